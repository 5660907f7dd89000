# SPDX-License-Identifier: Apache-2.0
"""Runs the coordinator of `kvlink coordinator` on its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping

from kvlink.coordinator.coordinator import Coordinator
from kvlink.demo.messages import Reply


class CoordinatorRole:
    """Serves from construction until `close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="coordinator", daemon=True)
        self._thread.start()
        self._coordinator, self._address = asyncio.run_coroutine_threadsafe(_start(), self._loop).result()

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"address": lambda: {"address": self._address}}

    def close(self) -> None:
        """Implements Role."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._coordinator.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _start() -> tuple[Coordinator, str]:
    coordinator = Coordinator()
    return coordinator, await coordinator.start()
