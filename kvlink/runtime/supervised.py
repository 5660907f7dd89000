# SPDX-License-Identifier: Apache-2.0
"""Starts all background work of kvlink, so that an exception nobody expected ends one round of it and nothing else.

Every exception is counted by the name of the loop (`failures`, the metric kvlink_loop_restarts_total) and logged: the
first of its type with the trace, later ones in one line. `tests/supervision.py` refuses threads, tasks and callbacks
that are started in another way.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

from kvlink.backoff import Backoff

_log = logging.getLogger("kvlink.loops")

P = ParamSpec("P")
T = TypeVar("T")

_HEALTHY_S = 10.0
"""A loop that ran for so long restarts after the first delay of its back-off."""

_counts: Counter[str] = Counter()
_traced: set[tuple[str, type[BaseException]]] = set()
_lock = threading.Lock()


def failures() -> dict[str, int]:
    """Returns how many exceptions each loop of this process has survived, by the name of the loop."""
    with _lock:
        return dict(_counts)


def survived(name: str, error: BaseException) -> None:
    """Counts and logs an exception after which the work called `name` goes on. Safe from any thread."""
    kind = (name, type(error))
    with _lock:
        _counts[name] += 1
        is_new = kind not in _traced
        _traced.add(kind)
    _log.error("unexpected error, going on loop=%s error=%r", name, error, exc_info=error if is_new else None)


async def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Runs `run` until it returns, again after an exception, with a back-off. Ends when it is cancelled."""
    clock, backoff = asyncio.get_running_loop().time, Backoff()
    while True:
        began = clock()
        try:
            await run()
            return
        except Exception as error:
            survived(name, error)
        if clock() - began >= _HEALTHY_S:
            backoff.reset()
        await asyncio.sleep(backoff.delay_s())


def start_loop(name: str, run: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
    """Starts `keep_running` on the running event loop. The caller owns the task and cancels it."""
    return asyncio.get_running_loop().create_task(keep_running(name, run), name=f"kvlink {name}")


def start_job(name: str, job: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
    """Starts work that no caller waits for on the running event loop. The caller keeps a reference until it ends."""

    async def run() -> None:
        try:
            await job
        except Exception as error:
            survived(name, error)

    return asyncio.get_running_loop().create_task(run(), name=f"kvlink {name}")


def start_awaited(job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Starts work whose result the caller awaits or reads, so that no exception is lost."""
    return asyncio.get_running_loop().create_task(job)


def guarded(name: str, call: Callable[P, object]) -> Callable[P, None]:
    """Returns a callback for an event loop or a future that survives exceptions of `call`."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception as error:
            survived(name, error)

    return run


def start_thread(
    name: str, run: Callable[[], None], stopping: threading.Event | None = None, *, daemon: bool = True
) -> threading.Thread:
    """Starts a thread that calls `run` until it returns, and again after an exception, with a back-off.

    Once `stopping` is set, `run` is not called again. The caller ends `run` and joins the thread.
    """
    stopping = stopping or threading.Event()
    thread = threading.Thread(
        target=_keep_calling, args=(name, run, stopping), name=f"kvlink-{name}", daemon=daemon
    )
    thread.start()
    return thread


def _keep_calling(name: str, run: Callable[[], None], stopping: threading.Event) -> None:
    backoff = Backoff()
    while not stopping.is_set():
        began = time.monotonic()
        try:
            run()
            return
        except Exception as error:
            survived(name, error)
        if time.monotonic() - began >= _HEALTHY_S:
            backoff.reset()
        stopping.wait(backoff.delay_s())
