# SPDX-License-Identifier: Apache-2.0
"""A tenant with many long messages leaves the loop to the others after each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvlink.control.codec import Codec
from kvlink.control.rpc.server import Turns
from kvlink.control.security import Caller, set_caller

LONG = bytes(5_000)


async def test_one_long_message_of_each_tenant_a_turn() -> None:
    turns, decoded = Turns(), []

    def note(tenant: str) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            set_caller(Caller(tenant))
            codec: Codec[None] = Codec(lambda value: b"", lambda blob: decoded.append(tenant))
            await turns.decode(codec, LONG)

        return call

    evil = [asyncio.create_task(note("evil")()) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(*[asyncio.create_task(note("good")()) for _ in range(3)])
    assert decoded.count("good") == 3
    assert decoded.count("evil") <= 5
    await asyncio.gather(*evil)
    assert len(decoded) == 23


async def test_a_call_that_is_cancelled_gives_its_turn_away() -> None:
    turns, decoded = Turns(), []
    codec: Codec[None] = Codec(lambda value: b"", decoded.append)
    first, second, third = (asyncio.create_task(turns.decode(codec, LONG)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await third
    assert len(decoded) == 1
