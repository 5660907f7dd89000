# SPDX-License-Identifier: Apache-2.0
"""The agents that a process calls now and then: one client for each, as long as it is needed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from kvlink.control.client import AgentClient
from kvlink.control.now import now
from kvlink.control.security import Security
from kvlink.forks import check_grpc

_UNUSED_S = 300.0  # far more than any call takes: none runs on a client that is closed for it


@dataclass(slots=True)
class _Kept:
    client: AgentClient
    asked_for: float


class AgentClients:
    """Clients by "host:port". Workers come and go, each at another port: those that nobody has asked for in five
    minutes are closed. Belongs to the event loop that it is used on; may be made on any thread. Raises ConfigError in a
    forked child of a process in which kvlink ran.
    """

    def __init__(self, security: Security | None = None, clock: Callable[[], float] = now) -> None:
        check_grpc()
        self._security = security
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the one asked for last is the last
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, address: str) -> AgentClient:
        """For the next call; whoever calls again asks again. Raises ConfigError for another form of address."""
        now = self._clock()
        kept = self._kept.get(address)
        if kept is None:
            kept = self._kept[address] = _Kept(AgentClient(address, security=self._security), now)
        kept.asked_for = now
        self._kept.move_to_end(address)
        self._close_unused(now)
        return kept.client

    async def close(self) -> None:
        """Ends running calls. Idempotent."""
        while self._kept:
            await self._kept.popitem()[1].client.close()
        await asyncio.gather(*self._closing)

    def _close_unused(self, now: float) -> None:
        while (oldest := next(iter(self._kept.values()))).asked_for < now - _UNUSED_S:
            self._kept.popitem(last=False)
            closing = asyncio.create_task(oldest.client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
