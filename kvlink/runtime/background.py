# SPDX-License-Identifier: Apache-2.0
"""Runs the background thread of a process, whose event loop owns all gRPC objects, and closes them with it."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import inspect
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor  # its module cannot be loaded at interpreter exit
from contextlib import closing
from functools import partial
from typing import Any, Protocol, TypeVar

from kvlink.errors import Cancelled, ConfigError, CoordinatorUnavailable, KVLinkError
from kvlink.runtime import supervised
from kvlink.runtime.forks import ADVICE, use_grpc
from kvlink.runtime.supervised import guarded, keep_calling, keep_running, start_thread

_log = logging.getLogger("kvlink.worker")

T = TypeVar("T")

_STOP_TIMEOUT_S = 5.0


class ControlThread:
    """Runs coroutines for callers outside asyncio. It is closed automatically at interpreter exit."""

    def __init__(self, name: str = "kvlink-control") -> None:
        use_grpc()
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        run = partial(_run, self._loop, self._stopping)
        self._thread = start_thread("control thread", run, self._stopping, thread_name=name)
        _open.add(self)

    @classmethod
    def shared(cls) -> ControlThread:
        """Returns the thread of this process, which is created on first use and runs until exit.

        All Workers share it, because gRPC delivers the completions of every loop on whichever loop polls first, and
        reports an error for those whose loop is closed.
        """
        global _shared
        with _sharing:
            if _shared is None or _shared._why_not():
                _shared = cls()
            return _shared

    def __repr__(self) -> str:
        state = "of another process" if self._pid != os.getpid() else "closed" if self._closed else "running"
        return f"ControlThread({self._thread.name}, {state})"

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of the thread. Other threads use the methods of this class."""
        return self._loop

    def submit(self, job: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine on the loop, whose future the caller reads. Raises ConfigError after `close` and in a
        forked child."""
        why = self._why_not()
        if why:
            job.close()
            raise ConfigError(why)
        return asyncio.run_coroutine_threadsafe(job, self._loop)

    def run(self, job: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Waits for the result of a coroutine, and cancels it on an interrupt or after `timeout_s` seconds.

        Raises CoordinatorUnavailable on timeout, and ConfigError on the loop's own thread and where `submit` does.
        """
        if threading.current_thread() is self._thread:
            job.close()
            raise ConfigError("run() would wait for its own thread; await the coroutine instead")
        future = self.submit(job)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():
                raise
            raise CoordinatorUnavailable(f"the control plane did not finish within {timeout_s} s") from None
        finally:
            future.cancel()

    def in_background(
        self, job: Coroutine[Any, Any, object], warning: str, *, name: str = "control job"
    ) -> concurrent.futures.Future[object]:
        """Starts a coroutine that no caller waits for. If it fails, logs `warning` with the error, and counts an error
        that is not kvlink's by `name`. Raises ConfigError like `submit`.
        """

        def note_failure(future: concurrent.futures.Future[object]) -> None:
            if future.cancelled() or (error := future.exception()) is None:
                return
            _log.warning("%s error=%s", warning, supervised.shown(error))
            if not isinstance(error, KVLinkError):
                supervised.survived(name, error)

        running: concurrent.futures.Future[object] = self.submit(job)
        running.add_done_callback(guarded(name, note_failure))
        return running

    def keep_running(
        self, name: str, run: Callable[[], Awaitable[object]]
    ) -> concurrent.futures.Future[None]:
        """Starts a loop, which runs again after an exception, until the future is cancelled or `run` returns."""
        return self.submit(keep_running(name, run))

    def on_loop(self, name: str, call: Callable[..., object], *args: object) -> None:
        """Calls a function on the loop. Has no effect after `close` and in a forked child."""
        if not self._why_not():
            self._loop.call_soon_threadsafe(guarded(name, call), *args)

    def close(self) -> None:
        """Cancels running coroutines and stops the thread. Close agents and clients first. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        _open.discard(self)
        self._stopping.set()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_TIMEOUT_S)

    def _why_not(self) -> str:
        if self._pid != os.getpid():
            return f"this process was forked from {self._pid}, and a kvlink worker does not survive a fork; {ADVICE}"
        return "the control thread is closed" if self._closed else ""


_open: weakref.WeakSet[ControlThread] = weakref.WeakSet()
_shared: ControlThread | None = None
_sharing = threading.Lock()


@atexit.register
def _close_all() -> None:
    for thread in list(_open):
        thread.close()


def _run(loop: asyncio.AbstractEventLoop, stopping: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    # Not shutdown_default_executor(): it starts a thread, which Python 3.12 refuses at interpreter exit.
    with closing(loop), ThreadPoolExecutor(thread_name_prefix="asyncio") as executor:
        loop.set_default_executor(executor)
        keep_calling("event loop", loop.run_forever, stopping)
        loop.run_until_complete(close_all())
        _cancel(loop, [task for task in asyncio.all_tasks(loop) if inspect.iscoroutine(task.get_coro())])
        # The remaining tasks are gRPC's, in Cython. They end without help and would print a traceback when cancelled.
        _wait_for(loop, asyncio.all_tasks(loop))
        _cancel(loop, asyncio.all_tasks(loop))
        loop.run_until_complete(loop.shutdown_asyncgens())


def _cancel(loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    _wait_for(loop, tasks)


def _wait_for(loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[Any]]) -> None:
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S))


class Closable(Protocol):
    """A gRPC channel or server that must be closed before its event loop."""

    async def close(self) -> None:
        """Closes the object. Idempotent."""


_closables: weakref.WeakValueDictionary[tuple[int, int], Closable] = weakref.WeakValueDictionary()
"""Objects to close, by the id of their event loop and the order of registration."""
_numbers = itertools.count()


def close_with_loop(closable: Closable) -> None:
    """Registers an object of the running event loop for `close_all`. Only a weak reference is kept."""
    _closables[id(asyncio.get_running_loop()), next(_numbers)] = closable


async def close_all() -> None:
    """Closes the objects that are still open on the running event loop, in reverse order of registration."""
    here = id(asyncio.get_running_loop())
    for key in sorted((key for key in list(_closables) if key[0] == here), reverse=True):
        closable = _closables.pop(key, None)
        if closable is not None:
            await _close(closable)


async def _close(closable: Closable) -> None:
    """Closes one object. The others are closed even if it fails."""
    try:
        await closable.close()
    except Exception as error:
        supervised.survived("event loop", error)


def off_loop(call: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Runs a blocking call on an executor thread of the running loop.

    Raises Cancelled (the call raises, not the future) while the interpreter exits, because executors stop before any
    server or pull is closed.
    """
    loop = asyncio.get_running_loop()
    try:
        return loop.run_in_executor(None, call, *args)
    except RuntimeError:
        raise Cancelled("this process is exiting") from None
