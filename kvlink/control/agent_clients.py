# SPDX-License-Identifier: Apache-2.0
"""Keeps one client for each agent that a process calls from time to time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvlink.control.client import AgentClient
from kvlink.control.now import now
from kvlink.control.security import Security
from kvlink.forks import check_grpc

_UNUSED_S = 300.0  # far longer than any call, so no call runs on a client that is closed as unused


@dataclass(slots=True)
class _Kept:
    client: AgentClient
    asked_for: float


class AgentClients:
    """Maps "host:port" to a client, and closes clients that were not used for five minutes.

    Workers come and go, each at another port. An instance belongs to the event loop that it is used on, and may be
    created on any thread. Raises ConfigError in a forked child of a process in which kvlink ran.
    """

    def __init__(self, security: Security | None = None, clock: Callable[[], float] = now) -> None:
        check_grpc()
        self._security = security
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # in the order of their last use
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, address: str) -> AgentClient:
        """Returns the client to use for the next call only. Raises ConfigError for another form of address."""
        now = self._clock()
        kept = self._kept.get(address)
        if kept is None:
            kept = self._kept[address] = _Kept(AgentClient(address, security=self._security), now)
        kept.asked_for = now
        self._kept.move_to_end(address)
        self._close_unused(now)
        return kept.client

    async def close(self) -> None:
        """Cancels running calls. Closing again has no effect."""
        while self._kept:
            await self._kept.popitem()[1].client.close()
        await asyncio.gather(*self._closing)

    def _close_unused(self, now: float) -> None:
        while (oldest := next(iter(self._kept.values()))).asked_for < now - _UNUSED_S:
            self._kept.popitem(last=False)
            closing = asyncio.create_task(oldest.client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
