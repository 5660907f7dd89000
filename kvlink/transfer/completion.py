# SPDX-License-Identifier: Apache-2.0
"""Lets asyncio wait for C++ threads through one eventfd per event loop, without another thread in between."""

from __future__ import annotations

import asyncio
import itertools
import math
import select
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from kvlink import _core
from kvlink.runtime.forks import num_forks
from kvlink.runtime.supervised import guarded
from kvlink.transfer.engine import CompletionQueue, Engine

T = TypeVar("T")

_MOST_MS = 2**31 - 1  # the largest timeout of poll(2)


class LoopWaiter:
    """Waits for pulls on behalf of one event loop. Only the thread of that loop uses it, and it lives as long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = CompletionQueue()
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._tokens = itertools.count(1)
        loop.add_reader(self._queue.fileno(), guarded("completions", self._drain))

    @classmethod
    def of_running_loop(cls) -> LoopWaiter:
        """Returns the waiter of the running loop, which is created on first use."""
        loop = asyncio.get_running_loop()
        waiter = _waiters.get(loop)
        if waiter is None:
            waiter = _waiters[loop] = cls(loop)
        return waiter

    async def ended(self, pull: _core.Pull) -> None:
        """Returns when the pull has ended, with or without success."""
        token = next(self._tokens)
        future = self._waiting[token] = asyncio.get_running_loop().create_future()
        try:
            if pull.notify(self._queue, token):
                await future
        finally:
            self._waiting.pop(token, None)

    def _drain(self) -> None:
        for token in self._queue.drain():
            future = self._waiting.pop(token, None)
            if future is not None and not future.done():
                future.set_result(None)


class SharedAwaitable(Coroutine[Any, Any, T]):
    """An operation that any number of tasks may await, and that a task may run like a coroutine.

    asyncio wraps an object that is only awaitable. A wrapper that is cancelled before its first step never awaits the
    object, so the operation would not learn that it was cancelled.
    """

    __slots__ = ()

    @abstractmethod
    async def _ended(self) -> T:
        """Returns the result to one of the waiting tasks."""

    @abstractmethod
    async def _cancelled(self) -> None:
        """Asks the operation to end and returns when it has ended."""

    def send(self, value: Any) -> Any:
        """Runs one step of the running task."""
        return _step(self._ended, lambda run: run.send(value))

    def throw(self, kind: Any, error: Any = None, trace: Any = None, /) -> Any:
        """Runs one step of the running task with an exception, for example after it was cancelled."""
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
        raise RuntimeError("no task is running; await the object, or pass it to a task")
    run = _runs.get(task)
    if run is None:
        run = _runs[task] = begin()
    try:
        return step(run)
    except BaseException:  # StopIteration, with the result
        _runs.pop(task, None)
        raise


async def cancellation(waiting: Awaitable[object]) -> asyncio.CancelledError | None:
    """Awaits `waiting` and returns the CancelledError that interrupted it, or None."""
    try:
        await waiting
    except asyncio.CancelledError as error:
        return error
    return None


class QueueReader:
    """Calls `on_ready` with the entries of `queue` whenever it has some, on the event loop that is running at
    construction."""

    def __init__(self, on_ready: Callable[[list[int]], object]) -> None:
        self.queue = CompletionQueue()
        self._made_at = num_forks()
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.queue.fileno(), guarded("engine events", self._read))

    def close(self) -> None:
        """Stops the calls. Idempotent."""
        if self._made_at != num_forks():
            return  # in a forked child, the loop shares its descriptors with the parent
        if self.queue.fileno() >= 0:
            self._loop.remove_reader(self.queue.fileno())
            self.queue.close()

    def _read(self) -> None:
        self._on_ready(self.queue.drain())


async def when_ended(engine: Engine, poll: Callable[[], Iterable[T]]) -> AsyncIterator[T]:
    """Yields the results of `poll`, now and whenever leases have ended, on the running event loop until the engine is
    closed."""
    ready = asyncio.Event()
    reader = QueueReader(lambda _: ready.set())
    try:
        engine.core.watch_ended(reader.queue)
        engine.notify_when_closed(reader.queue)
        while True:
            closed = engine.closed  # read it before the last call of `poll`
            for found in poll():
                yield found
            if closed:
                return
            await ready.wait()
            ready.clear()
    finally:
        engine.stop_notifying(reader.queue)
        reader.close()


def each_ended(engine: Engine, poll: Callable[[], Iterable[T]], timeout_s: float | None) -> Iterator[T]:
    """Yields like `when_ended`, on the calling thread, and also ends when no lease has ended for `timeout_s` seconds.

    None waits without a limit.
    """
    queue, waiting = CompletionQueue(), select.poll()
    timeout_ms = None if timeout_s is None else min(math.ceil(timeout_s * 1000), _MOST_MS)
    try:
        engine.core.watch_ended(queue)
        engine.notify_when_closed(queue)
        waiting.register(queue.fileno(), select.POLLIN)
        while True:
            closed = engine.closed
            yield from poll()
            if closed or not waiting.poll(timeout_ms):
                return
            queue.drain()
    finally:
        engine.stop_notifying(queue)
        queue.close()


_runs: weakref.WeakKeyDictionary[asyncio.Task[Any], Coroutine[Any, Any, Any]] = weakref.WeakKeyDictionary()
_waiters: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaiter] = weakref.WeakKeyDictionary()
