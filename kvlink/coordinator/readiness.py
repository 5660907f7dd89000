# SPDX-License-Identifier: Apache-2.0
"""Whether a coordinator wants new callers, as its gRPC health service and /ready say it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvlink.control.values import StoreHealth

_log = logging.getLogger("kvlink.control")

_LOOK_EVERY_S = 0.5


class Readiness:
    """Looks at the store until `close`. `say(ready)` reaches the health service."""

    def __init__(
        self,
        say: Callable[[bool], Awaitable[None]],
        health: Callable[[], StoreHealth],
        is_leaving: Callable[[], bool],
    ) -> None:
        self.health = health
        self._say = say
        self._is_leaving = is_leaving
        self._said = True
        self._looking: asyncio.Task[None] | None = None

    def why_not(self) -> str:
        """Why callers should go elsewhere; "": they need not. A store that is full is full for all replicas."""
        if self._is_leaving():
            return "ending"
        health = self.health()
        return f"the store has not answered for {health.stale_s:.0f} s" if health.is_lost else ""

    def start(self) -> None:
        """Once."""
        self._looking = asyncio.get_running_loop().create_task(self._look_on())

    async def look(self) -> None:
        """Tells the health service if anything has changed."""
        why = self.why_not()
        if self._said == (not why):
            return
        self._said = not why
        if self._is_leaving():
            _log.info("not ready: %s", why)
        elif why:
            _log.warning("not ready: %s", why)
        else:
            _log.warning("ready again")
        await self._say(self._said)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self.look()

    async def close(self) -> None:
        """Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
