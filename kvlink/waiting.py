# SPDX-License-Identifier: Apache-2.0
"""How asyncio waits for C++ threads: an eventfd per loop, drained by the loop itself. No thread in between."""

from __future__ import annotations

import asyncio
import itertools
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from kvlink.engine import CompletionQueue, Engine, Transfer

T = TypeVar("T")


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


class Awaited(Coroutine[Any, Any, T]):
    """What any number of tasks may wait for, and what a task may run as if it were a coroutine.

    asyncio wraps what can only be awaited, and a wrapper that is cancelled before its first step never begins to
    wait: what it was to wait for would not hear of that.
    """

    __slots__ = ()

    @abstractmethod
    async def _ended(self) -> T:
        """Returns the result, for one of those who wait."""

    @abstractmethod
    async def _cancelled(self) -> None:
        """Returns when it has ended, which it is asked to."""

    def send(self, value: Any) -> Any:
        """One step of the running task."""
        return _step(self._ended, lambda run: run.send(value))

    def throw(self, kind: Any, error: Any = None, trace: Any = None, /) -> Any:
        """One step of the running task, which was cancelled."""
        thrown = kind if isinstance(kind, BaseException) else error or kind()
        if asyncio.current_task() in _runs:
            return _step(self._ended, lambda run: run.throw(thrown))
        return _step(lambda: self._not_begun(thrown), lambda run: run.send(None))

    async def _not_begun(self, thrown: BaseException) -> T:
        if isinstance(thrown, asyncio.CancelledError):
            await self._cancelled()
        raise thrown


_Run = Coroutine[Any, Any, T]


def _step(begin: Callable[[], _Run[T]], step: Callable[[_Run[T]], Any]) -> Any:
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("await it, or have a task run it")
    run = _runs.get(task)
    if run is None:
        run = _runs[task] = begin()
    try:
        return step(run)
    except BaseException:  # StopIteration, with the result
        _runs.pop(task, None)
        raise


async def cancellation(waiting: Awaitable[object]) -> asyncio.CancelledError | None:
    """Waits, and returns what cut that short."""
    try:
        await waiting
    except asyncio.CancelledError as error:
        return error
    return None


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


async def when_ended(engine: Engine, look: Callable[[], Iterable[T]]) -> AsyncIterator[T]:
    """What `look` gives, and gives again whenever leases of the engine have ended. On the running event loop."""
    rung = asyncio.Event()
    bell = Bell(rung.set)
    engine.core.watch_ended(bell.queue)
    try:
        while True:
            for found in look():
                yield found
            await rung.wait()
            rung.clear()
    finally:
        bell.close()


_runs: weakref.WeakKeyDictionary[asyncio.Task[Any], Coroutine[Any, Any, Any]] = weakref.WeakKeyDictionary()
_waiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaiter] = weakref.WeakKeyDictionary()
