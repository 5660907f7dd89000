# SPDX-License-Identifier: Apache-2.0
"""Serves a coordinator and a worker agent without a garbage collector: `python uncollected.py` prints their addresses.

The token `DENIED` is refused by the gate of both, as a certificate would be under TLS.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Sequence

from control.cards import make_card

from kvlink.control import WorkerAgent
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.security.callers import Caller
from kvlink.coordinator import Coordinator
from kvlink.errors import TransportUnavailable

DENIED, TRANSPORT, BROKEN = "nobody", "tcp", "broken"


def gate(method: str, names: Sequence[str], token: str) -> Caller:
    if token == DENIED:
        raise RefusedError(Reason.DENIED, "you are nobody")
    return Caller()


def accept(transport: str, hellos: list[bytes], takes_keys: bool, caller: int) -> tuple[int, list[bytes]]:
    if transport == BROKEN:
        raise ZeroDivisionError
    if transport != TRANSPORT:
        raise TransportUnavailable(f"there is no {transport}")
    return 1, list(hellos)


async def serve() -> None:
    coordinator = Coordinator()
    agent = WorkerAgent(accept, lambda slot, nonce: True, lambda slot, nonce: True)
    for each in (coordinator._server, agent._server):
        each._gate = gate
    agent.publish(make_card())
    print(await coordinator.start(), await agent.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await agent.close()
    await coordinator.close()


if __name__ == "__main__":
    gc.disable()
    asyncio.run(serve())
