# SPDX-License-Identifier: Apache-2.0
"""A constructor that raises leaves nothing behind, wherever it raises.

A trace function raises at each line of the constructors in turn, as an interrupt could.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from descriptors import descriptors
from waiting import eventually

from kvlink import BlockPool, Worker
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.transfer.engine import Engine
from kvlink.worker import worker as workers
from kvlink.worker.membership import WorkerMembership

_CODES = {Worker.__init__.__code__, Engine.__init__.__code__, Engine._start.__code__}


class InjectedError(BaseException):
    """Nobody expects it."""


class RaisesAt:
    """Raises at the line of this number that runs in one of `codes`, and counts them."""

    def __init__(self, number: int, codes: set[CodeType]) -> None:
        self._number, self._codes = number, codes
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in self._codes:
            return None
        if event == "line" and not hasattr(frame.f_locals["self"], "_opened"):  # from then on, it is made
            self.lines += 1
            if self.lines == self._number:
                raise InjectedError
        return self


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool.allocate(dense(Geometry(1, 1, 64, 8)), huge_pages=False)


def made(pool: BlockPool) -> Worker:
    return Worker(pool, "worker", transports="tcp,loopback")


def threads() -> Counter[str]:
    """Counts this process's threads by name, those of C++ too."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return Counter(name for name in names if name.startswith("kvlink"))


def held() -> Counter[str]:
    """Counts what workers hold: descriptors, threads of C++ and Python, and places among the open ones."""
    others = Counter({"Python threads": threading.active_count(), "open workers": len(workers._open_workers)})
    return descriptors() + threads() + others


@pytest.fixture
def before(pool: BlockPool) -> Iterator[Counter[str]]:
    """Yields what is held once the parts that all workers of a process share are there."""
    for _ in range(2):
        made(pool).close()
    gc.collect()
    gc.freeze()  # each count of the descriptors collects
    yield held()
    gc.unfreeze()


@pytest.mark.filterwarnings(
    "ignore:coroutine .* was never awaited:RuntimeWarning"
)  # it was not begun, either
def test_an_error_at_any_line_leaves_nothing(pool: BlockPool, before: Counter[str]) -> None:
    number = 0
    while True:
        number += 1
        raises = RaisesAt(number, _CODES)
        sys.settrace(raises)
        try:
            made(pool).close()
            break
        except InjectedError:
            pass
        finally:
            sys.settrace(None)
        eventually(lambda: not held() - before)
    assert raises.lines == number - 1 > 60


@pytest.mark.parametrize("step", ["of", "open", "join"])
def test_an_error_on_the_control_thread_leaves_nothing(
    pool: BlockPool,
    before: Counter[str],
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = getattr(WorkerMembership, step)

    async def fails(*given: Any) -> None:
        await plain(*given)
        raise ConfigError("late")

    monkeypatch.setattr(WorkerMembership, step, fails)
    with pytest.raises(ConfigError, match="late"):
        made(pool)
    monkeypatch.undo()
    eventually(lambda: not held() - before)


def test_what_cannot_be_closed_does_not_keep_the_rest(pool: BlockPool, before: Counter[str]) -> None:
    worker = made(pool)

    async def fails() -> None:
        raise RuntimeError("nobody expects it")

    worker._membership._leave_session = fails  # type: ignore[method-assign]
    with contextlib.suppress(RuntimeError):  # pytest.raises would keep its frames, and the worker
        worker.close()
    del worker  # gRPC frees its sockets with the last reference
    eventually(lambda: not held() - before)


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_watch_that_cannot_begin_leaves_no_descriptor(pool: BlockPool, blocking: bool) -> None:
    def unable(_: object) -> None:
        raise ConfigError("late")

    async def begin(worker: Worker) -> object:
        return next(worker.watch_events_blocking()) if blocking else await anext(worker.watch_events())

    with made(pool) as worker:
        worker._engine.notify_when_closed = unable  # type: ignore[method-assign]
        before = descriptors()
        with pytest.raises(ConfigError, match="late") as raised:
            await begin(worker)
        assert raised.traceback  # its frames refer to what is not closed
        assert not descriptors() - before
