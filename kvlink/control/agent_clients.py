# SPDX-License-Identifier: Apache-2.0
"""Keeps one client for each agent that a process calls from time to time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvlink.control.client import AgentClient
from kvlink.control.now import now
from kvlink.control.security import Security
from kvlink.runtime.forks import check_grpc
from kvlink.runtime.supervised import start_job

_UNUSED_S = 300.0  # far longer than any call, so no call runs on a client that is closed as unused


class AgentClients:
    """Maps "host:port" to a client, and closes clients that were not used for five minutes.

    Workers come and go, each at another port. An instance belongs to the event loop that it is used on, and may be
    created on any thread. Raises ConfigError in a forked child of a process in which kvlink ran.
    """

    def __init__(self, security: Security | None = None, clock: Callable[[], float] = now) -> None:
        check_grpc()
        self._security = security
        self._clock = clock
        self._kept: dict[str, tuple[AgentClient, float]] = {}
        """Clients and the times of their last use, in the order of these times."""
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, address: str) -> AgentClient:
        """Returns the client to use for the next call only. Raises ConfigError for another form of address."""
        now = self._clock()
        client, _ = self._kept.pop(address, (None, 0.0))
        client = client or AgentClient(address, security=self._security)
        self._kept[address] = client, now
        self._close_unused(now)
        return client

    async def close(self) -> None:
        """Cancels running calls. Closing again has no effect."""
        while self._kept:
            await self._kept.popitem()[1][0].close()
        await asyncio.gather(*self._closing)

    def _close_unused(self, now: float) -> None:
        for address, (client, asked_for) in list(self._kept.items()):
            if asked_for >= now - _UNUSED_S:
                return
            del self._kept[address]
            closing = start_job("unused client", client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
