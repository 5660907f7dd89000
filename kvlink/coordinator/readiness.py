# SPDX-License-Identifier: Apache-2.0
"""Decides whether a coordinator wants new callers. Its gRPC health service and /ready report that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvlink.control.values import StoreHealth
from kvlink.runtime.supervised import start_loop

_log = logging.getLogger("kvlink.control")

_LOOK_EVERY_S = 0.5


class Readiness:
    """Checks the store every 0.5 s until `close`, and calls `report(ready)` for the health service on a change."""

    def __init__(
        self,
        report: Callable[[bool], Awaitable[None]],
        health: Callable[[], StoreHealth],
        is_draining: Callable[[], bool],
    ) -> None:
        self.health = health
        self._report = report
        self._is_draining = is_draining
        self._reported = True
        self._loop: asyncio.Task[None] | None = None

    def why_not(self) -> str:
        """Returns why callers should go to another coordinator, or "" if they need not.

        A full store is no reason, because it is full for all replicas.
        """
        if self._is_draining():
            return "shutting down"
        health = self.health()
        return f"the store has not answered for {health.stale_s:.0f} s" if health.is_lost else ""

    def start(self) -> None:
        """Starts checking. Call it once."""
        self._loop = start_loop("readiness", self._watch)

    async def poll(self) -> None:
        """Checks the store now, and reports a change to the health service."""
        why = self.why_not()
        if self._reported == (not why):
            return
        await self._report(not why)  # a report that fails is repeated at the next check
        self._reported = not why
        if self._is_draining():
            _log.info("not ready: %s", why)
        elif why:
            _log.warning("not ready: %s", why)
        else:
            _log.warning("ready again")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.poll()

    async def close(self) -> None:
        """Stops checking. Closing again has no effect."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
