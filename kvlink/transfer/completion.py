# SPDX-License-Identifier: Apache-2.0
"""How asyncio waits for C++ threads: an eventfd per loop, drained by the loop itself. No thread in between."""

from __future__ import annotations

import asyncio
import itertools
import math
import select
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from kvlink.forks import num_forks
from kvlink.transfer.engine import CompletionQueue, Engine, Transfer

T = TypeVar("T")

_MOST_MS = 2**31 - 1  # as poll(2) takes it


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
        self._made_at = num_forks()
        self._rung = rung
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.queue.fileno(), self._ring)

    def close(self) -> None:
        """Idempotent."""
        if self._made_at != num_forks():
            return  # a forked child: the loop's descriptors are the parent's as well
        if self.queue.fileno() >= 0:
            self._loop.remove_reader(self.queue.fileno())
            self.queue.close()

    def _ring(self) -> None:
        self.queue.drain()
        self._rung()


async def when_ended(engine: Engine, look: Callable[[], Iterable[T]]) -> AsyncIterator[T]:
    """Yields what `look` returns, now and whenever leases have ended, on the running event loop until the engine is
    closed."""
    rung = asyncio.Event()
    bell = Bell(rung.set)
    engine.core.watch_ended(bell.queue)
    engine.ring_when_closed(bell.queue)
    try:
        while True:
            closed = engine.closed  # before the last look
            for found in look():
                yield found
            if closed:
                return
            await rung.wait()
            rung.clear()
    finally:
        engine.forget(bell.queue)
        bell.close()


def each_ended(engine: Engine, look: Callable[[], Iterable[T]], timeout_s: float | None) -> Iterator[T]:
    """As `when_ended`, for a thread; ends too once nothing has come for `timeout_s`. None: waits without end."""
    queue, waiting = CompletionQueue(), select.poll()
    engine.core.watch_ended(queue)
    engine.ring_when_closed(queue)
    waiting.register(queue.fileno(), select.POLLIN)
    timeout_ms = None if timeout_s is None else min(math.ceil(timeout_s * 1000), _MOST_MS)
    try:
        while True:
            closed = engine.closed
            yield from look()
            if closed or not waiting.poll(timeout_ms):
                return
            queue.drain()
    finally:
        engine.forget(queue)
        queue.close()


_runs: weakref.WeakKeyDictionary[asyncio.Task[Any], Coroutine[Any, Any, Any]] = weakref.WeakKeyDictionary()
_waiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaiter] = weakref.WeakKeyDictionary()
