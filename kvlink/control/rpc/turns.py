# SPDX-License-Identifier: Apache-2.0
"""Divides a server's only thread among tenants: the long messages of one are decoded one at a time."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from kvlink.control.codec import Codec
from kvlink.control.security import caller

T = TypeVar("T")

_SHORT_BYTES = 4_096
"""Whatever a message of this size holds is decoded in less than a millisecond."""


class Turns:
    """Decodes the messages of a server. Belongs to one event loop."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        """By tenant."""

    async def decode(self, codec: Codec[T], blob: bytes) -> T:
        """Decodes a message of the running call. Before a long one, all others have a turn of the loop."""
        if len(blob) <= _SHORT_BYTES:
            return codec.decode(blob)
        async with self._locks.setdefault(caller().tenant, asyncio.Lock()):
            await asyncio.sleep(0)
            return codec.decode(blob)
