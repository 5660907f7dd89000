# SPDX-License-Identifier: Apache-2.0
"""How asyncio waits for C++ threads: an eventfd per loop, drained by the loop itself. No thread in between."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable

from kvlink.engine import CompletionQueue, Engine, Transfer


class LoopWaiter:
    """Everything one event loop waits for. Used on that loop's thread only, and goes when the loop goes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = CompletionQueue()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count(1)
        loop.add_reader(self._queue.fileno(), self._drain)

    @classmethod
    def of_running_loop(cls) -> LoopWaiter:
        """The waiter of the running loop, made on first use."""
        loop = asyncio.get_running_loop()
        waiter = _waiters.get(loop)
        if waiter is None:
            waiter = _waiters[loop] = cls(loop)
        return waiter

    async def ended(self, transfer: Transfer) -> None:
        """Returns when the transfer has ended, well or not."""
        token = next(self._tokens)
        future = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            if transfer.notify(self._queue, token):
                await future
        finally:
            self._waiting.pop(token, None)

    def _drain(self) -> None:
        for token in self._queue.drain():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)


class Bell:
    """Calls `rung` on the event loop that runs when it is made, whenever something has come into `queue`."""

    def __init__(self, rung: Callable[[], object]) -> None:
        self.queue = CompletionQueue()
        self._rung = rung
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.queue.fileno(), self._ring)

    def close(self) -> None:
        """Idempotent."""
        if self.queue.fileno() >= 0:
            self._loop.remove_reader(self.queue.fileno())
            self.queue.close()

    def _ring(self) -> None:
        self.queue.drain()
        self._rung()


class LeaseBell:
    """Rings on one event loop whenever leases of an engine have ended."""

    def __init__(self, engine: Engine) -> None:
        self._event = asyncio.Event()
        self._bell = Bell(self._event.set)
        engine.core.watch_ended(self._bell.queue)

    async def rung(self) -> None:
        """Waits for the next ring; one that came since the last wait counts."""
        await self._event.wait()
        self._event.clear()

    def close(self) -> None:
        """Idempotent."""
        self._bell.close()


_waiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaiter] = weakref.WeakKeyDictionary()
