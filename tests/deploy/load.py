# SPDX-License-Identifier: Apache-2.0
"""Hands requests over without pause until a line comes in; then says how many. Fails when one was lost or doubled."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from control.fleet import Load

from kvlink.coordinator.store.etcd.api import Etcd
from kvlink.errors import KVLinkError


async def main(coordinators: str, etcd: str) -> None:
    async with Load(coordinators, num_workers=2) as load:
        await load.goes_on(20)
        print("going", flush=True)
        while await asyncio.to_thread(sys.stdin.readline) == "on\n":
            await load.goes_on(20)
            print("going", flush=True)
    load.check()
    store = Etcd(etcd)
    try:
        await store.read(b"/")
        print("a worker may read etcd", flush=True)
    except KVLinkError as error:
        print(f"{load.num_offered} handed off; etcd to a worker: {error}", flush=True)
    await store.close()


asyncio.run(main(*sys.argv[1:]))
