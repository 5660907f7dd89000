# SPDX-License-Identifier: Apache-2.0
"""Stores go by the clock of their event loop unless they are given another. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from control.cards import make_card, make_offer
from control.fake_etcd import FakeEtcd
from virtual_time import run

from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore


def over_fake_etcd() -> Store:
    return EtcdStore("etcd://127.0.0.1:1/fleet", lease_s=7_200.0, trust=FakeEtcd())


@pytest.mark.parametrize("make", [lambda: MemoryStore(7_200.0), over_fake_etcd], ids=["memory", "fake"])
def test_a_ticket_expires_when_the_loop_says_so(make: Callable[[], Store]) -> None:
    async def main() -> None:
        store = make()
        await store.start()
        await store.join(make_card(), rejoin=False)
        await store.offer(make_offer("r", ttl_s=3_600.0))
        await asyncio.sleep(3_599.0)
        assert (await store.status()).tickets == 1
        await asyncio.sleep(2.0)
        assert ((await store.status()).tickets, (await store.status()).expired) == (0, 1)
        await store.close()

    run(main)
