# SPDX-License-Identifier: Apache-2.0
"""Starts all background work of kvlink, so that an exception nobody expected ends one round of it and nothing else.

Every exception is counted by the name of the loop (`failures`, the metric kvlink_loop_restarts_total) and logged: the
first of its type with the places it passed, later ones in a shorter line. `tests/supervision.py` refuses threads, tasks
and callbacks that are started in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from kvlink.errors import KVLinkError
from kvlink.runtime.backoff import Backoff

_log = logging.getLogger("kvlink.loops")

P = ParamSpec("P")
T = TypeVar("T")

_HEALTHY_S = 10.0
"""A loop that ran for so long restarts after the first delay of its back-off."""
_MAX_SHOWN = 300
_NO_VALUES = (AttributeError, ImportError, NameError, TypeError)
"""Python writes names into the texts of these errors, but no values."""

_counts: Counter[str] = Counter()
_by_type: Counter[tuple[str, type[BaseException]]] = Counter()
_lock = threading.Lock()
_running: set[asyncio.Task[Any]] = set()
"""Event loops keep weak references to tasks only."""


def failures() -> dict[str, int]:
    """Returns how many exceptions each loop of this process has survived, by the name of the loop. Some have none."""
    with _lock:
        return dict(_counts)


def survived(name: str, error: BaseException) -> None:
    """Counts and logs an exception after which the work called `name` goes on. Safe from any thread.

    The first exception of a type is logged, and a later one when their number has doubled, so that a callback that
    fails for each item does not fill the log.
    """
    with _lock:
        _counts[name] += 1
        _by_type[name, type(error)] += 1
        number = _by_type[name, type(error)]
    with contextlib.suppress(Exception):  # the handlers belong to the program around kvlink
        if number == 1:
            _log.error(
                "unexpected error, going on loop=%s error=%s trace=%s", name, shown(error), places(error)
            )
        elif number & (number - 1) == 0:
            _log.error("unexpected error, going on loop=%s error=%s number=%d", name, shown(error), number)


def shown(error: BaseException) -> str:
    """Returns the type of an error, and its text if that cannot hold a ticket, a nonce or a key."""
    text = error.strerror or "" if isinstance(error, OSError) else ""
    if isinstance(error, (KVLinkError, *_NO_VALUES)):
        text = str(error)
    text = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def places(error: BaseException) -> str:
    """Returns where an error was raised, from the outermost call to the innermost, without the values."""
    frames = traceback.extract_tb(error.__traceback__)
    return " > ".join(f"{Path(each.filename).name}:{each.lineno} {each.name}" for each in frames)


async def keep_running(name: str, run: Callable[[], Awaitable[object]]) -> None:
    """Runs `run` until it returns, again after an exception, with a back-off. Ends when it is cancelled.

    A cancellation of something that `run` awaits is an exception like others.
    """
    _announce(name)
    clock, backoff = asyncio.get_running_loop().time, Backoff()
    while True:
        began = clock()
        error = await _error_of(run)
        if error is None:
            return
        survived(name, error)
        if clock() - began >= _HEALTHY_S:
            backoff.reset()
        await asyncio.sleep(backoff.delay_s())


async def _error_of(run: Callable[[], Awaitable[object]]) -> BaseException | None:
    """Runs `run` once, in a task of its own, because only so a cancellation of it differs from one of the caller."""

    async def once() -> None:
        await run()

    task = asyncio.get_running_loop().create_task(once())
    try:
        await asyncio.wait([task])
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error


def start_loop(name: str, run: Callable[[], Awaitable[object]]) -> asyncio.Task[None]:
    """Starts `keep_running` on the running event loop. The caller owns the task and cancels it."""
    return _kept(name, keep_running(name, run))


def start_job(name: str, job: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
    """Starts work on the running event loop that no caller waits for. The task raises no Exception."""

    async def run() -> None:
        try:
            await job
        except Exception as error:
            survived(name, error)

    _announce(name)
    task = _kept(name, run())
    task.add_done_callback(lambda _: job.close())  # where it was cancelled before its first step
    return task


def start_awaited(job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts work whose result the caller awaits or reads, so that no exception is lost."""
    return asyncio.get_running_loop().create_task(job)


def _kept(name: str, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(job, name=f"kvlink {name}")
    _running.add(task)
    task.add_done_callback(_running.discard)
    return task


def guarded(name: str, call: Callable[P, object]) -> Callable[P, None]:
    """Returns a callback for an event loop or a future that survives exceptions of `call`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            survived(name, error)

    _announce(name)
    return run


def for_each(name: str, call: Callable[[T], object], items: Iterable[T]) -> None:
    """Calls `call` for each item. An exception of one is counted, and the others follow."""
    one = guarded(name, call)
    for item in items:
        one(item)


def start_thread(
    name: str,
    run: Callable[[], object],
    stopping: threading.Event | None = None,
    *,
    thread_name: str = "",
    daemon: bool = True,
) -> threading.Thread:
    """Starts a thread that calls `run` as `keep_calling` does. The caller ends `run` and joins the thread."""
    target = partial(keep_calling, name, run, stopping or threading.Event())
    thread = threading.Thread(target=target, name=thread_name or f"kvlink-{name}", daemon=daemon)
    thread.start()
    return thread


def keep_calling(name: str, run: Callable[[], object], stopping: threading.Event) -> None:
    """Calls `run` until it returns, again after an exception, with a back-off, unless `stopping` is set by then."""
    _announce(name)
    backoff = Backoff()
    while True:
        began = time.monotonic()
        try:
            run()
            return
        except Exception as error:
            survived(name, error)
        if time.monotonic() - began >= _HEALTHY_S:
            backoff.reset()
        if stopping.wait(backoff.delay_s()):
            return


def _announce(name: str) -> None:
    """Makes the count of a loop 0 before its first exception, because rates need a first value."""
    if name not in _counts:
        with _lock:
            _counts[name] += 0
