# SPDX-License-Identifier: Apache-2.0
"""Background work: what supervises it, and the rule that it is supervised."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Awaitable, Callable
from itertools import count, pairwise
from pathlib import Path

import pytest
from supervision import findings, loops, main
from virtual_time import run as in_virtual_time
from virtual_time import virtual

from kvlink.errors import ConfigError
from kvlink.runtime import supervised
from kvlink.runtime.backoff import FIRST_S, LONGEST_S
from kvlink.runtime.supervised import (
    failures,
    for_each,
    guarded,
    keep_calling,
    keep_running,
    shown,
    start_awaited,
    start_job,
    start_loop,
    start_thread,
    survived,
)


class Unexpected(Exception):
    """No code knows it."""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Names a loop that no other test has."""
    return str(request.node.name)


def failing(times: int, then: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[object]]:
    """A loop that raises so many times."""
    runs = count()

    async def run() -> object:
        if next(runs) < times:
            raise Unexpected
        return await then()

    return run


async def done() -> None:
    pass


async def endless() -> None:
    await asyncio.Event().wait()


@virtual
async def test_a_loop_starts_again_with_a_back_off(name: str) -> None:
    times: list[float] = []

    async def run() -> None:
        times.append(asyncio.get_running_loop().time())
        raise Unexpected

    loop = start_loop(name, run)
    await asyncio.sleep(30.0)
    loop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loop
    pauses = [after - before for before, after in pairwise(times)]
    assert FIRST_S / 2 <= pauses[0] <= FIRST_S
    assert all(LONGEST_S / 2 <= pause <= LONGEST_S for pause in pauses[7:])
    assert failures()[name] == len(times)


@virtual
async def test_a_loop_that_ran_for_long_starts_again_soon(name: str) -> None:
    times: list[float] = []

    async def run() -> None:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 8:
            await asyncio.sleep(11.0)
        raise Unexpected

    loop = start_loop(name, run)
    await asyncio.sleep(60.0)
    loop.cancel()
    assert times[7] - times[6] >= LONGEST_S / 2
    assert times[8] - times[7] <= 11.0 + FIRST_S


def test_a_loop_that_returns_ends(name: str) -> None:
    in_virtual_time(lambda: keep_running(name, failing(2, done)))
    assert failures()[name] == 2


@virtual
async def test_a_loop_has_the_count_0_from_its_start(name: str) -> None:
    start_loop(name, endless)
    await asyncio.sleep(0)
    assert failures()[name] == 0


def test_an_exception_of_the_call_that_makes_the_coroutine_counts_too(name: str) -> None:
    calls = count()

    def run() -> Awaitable[object]:
        if next(calls) == 0:
            raise Unexpected
        return done()

    in_virtual_time(lambda: keep_running(name, run))
    assert failures()[name] == 1


def test_a_cancellation_of_what_a_loop_awaits_does_not_end_it(name: str) -> None:
    runs = count()

    async def run() -> None:
        if next(runs) == 0:
            inner = asyncio.get_running_loop().create_future()
            inner.cancel()
            await inner

    in_virtual_time(lambda: keep_running(name, run))
    assert failures()[name] == 1


@virtual
async def test_cancelling_a_loop_ends_what_it_runs_first(name: str) -> None:
    ended = []

    async def run() -> None:
        try:
            await endless()
        finally:
            await asyncio.sleep(1.0)
            ended.append(True)

    loop = start_loop(name, run)
    await asyncio.sleep(1.0)
    loop.cancel()
    await asyncio.wait([loop])
    assert loop.cancelled()
    assert ended == [True]
    assert failures()[name] == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes(name: str, error: type[BaseException]) -> None:
    async def run() -> None:
        raise error

    def call() -> None:
        raise error

    with pytest.raises(error):
        in_virtual_time(lambda: keep_running(name, run))
    with pytest.raises(error):
        keep_calling(name, call, threading.Event())
    with pytest.raises(error):
        guarded(name, call)()
    with pytest.raises(error):
        for_each(name, lambda _: call(), [1])
    assert failures()[name] == 0


@virtual
async def test_a_job_survives_and_is_kept_until_it_ends(name: str) -> None:
    await start_job(name, failing(1, done)())  # type: ignore[arg-type]
    assert failures()[name] == 1
    held: list[weakref.ref[asyncio.Future[None]]] = []

    async def wait() -> None:
        future = asyncio.get_running_loop().create_future()
        held.append(weakref.ref(future))
        await future

    start_job(name, wait())
    await asyncio.sleep(0)
    gc.collect()
    future = held[0]()
    assert future is not None
    future.set_result(None)
    await asyncio.sleep(0)


@virtual
async def test_a_job_that_is_cancelled_before_it_runs_is_closed(
    name: str, recwarn: pytest.WarningsRecorder
) -> None:
    job = start_job(name, done())
    job.cancel()
    await asyncio.wait([job])
    assert job.cancelled()
    gc.collect()
    assert [str(each.message) for each in recwarn] == []


@virtual
async def test_awaited_work_raises_at_who_awaits_it() -> None:
    with pytest.raises(Unexpected):
        await start_awaited(failing(1, done)())  # type: ignore[arg-type]


def test_a_callback_survives(name: str) -> None:
    got = []

    def call(first: int, *, second: int) -> None:
        got.append((first, second))
        raise Unexpected

    guarded(name, call)(1, second=2)
    assert got == [(1, 2)]
    assert failures()[name] == 1


def test_one_item_does_not_stop_the_others(name: str) -> None:
    got = []

    def call(item: int) -> None:
        got.append(item)
        if item == 2:
            raise Unexpected

    for_each(name, call, [1, 2, 3])
    assert got == [1, 2, 3]
    assert failures()[name] == 1


class Stopping(threading.Event):
    """Counts instead of waiting. It is set after so many waits."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._after = after

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        if len(self.pauses) == self._after:
            self.set()
        return self.is_set()


def test_a_thread_calls_again_with_a_back_off_until_it_stops(name: str) -> None:
    stopping = Stopping(after=9)

    def call() -> None:
        raise Unexpected

    start_thread(name, call, stopping).join()
    assert failures()[name] == 9
    assert FIRST_S / 2 <= stopping.pauses[0] <= FIRST_S
    assert LONGEST_S / 2 <= stopping.pauses[8] <= LONGEST_S


def test_a_thread_whose_call_returns_ends(name: str) -> None:
    calls = count()

    def call() -> None:
        if next(calls) == 0:
            raise Unexpected

    thread = start_thread(name, call, Stopping(after=5), thread_name="kvlink-own")
    thread.join()
    assert (thread.name, thread.daemon) == ("kvlink-own", True)
    assert failures()[name] == 1


def test_a_thread_calls_once_even_if_it_has_been_stopped(name: str) -> None:
    stopping, calls = threading.Event(), []
    stopping.set()
    start_thread(name, lambda: calls.append(1), stopping).join()
    assert calls == [1]


def raise_(error: Exception) -> Exception:
    try:
        raise error
    except Exception as raised:
        return raised


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "kvlink.loops")
    return lambda: [each.getMessage() for each in caplog.records if each.name == "kvlink.loops"]


def test_the_first_of_a_type_is_logged_with_its_places(name: str, lines: Callable[[], list[str]]) -> None:
    for error in (Unexpected(), Unexpected(), ValueError()):
        survived(name, raise_(error))
    survived(f"{name} 2", raise_(Unexpected()))
    assert ["trace=test_supervised.py:" in line for line in lines()] == [True, False, True, True]
    assert " raise_" in lines()[0]
    assert lines()[1].endswith(f"loop={name} error=Unexpected number=2")


def test_the_log_is_not_filled_by_a_callback_that_fails_for_each_item(
    name: str, lines: Callable[[], list[str]]
) -> None:
    for _ in range(1000):
        survived(name, Unexpected())
    assert len(lines()) == 10
    assert failures()[name] == 1000


@pytest.mark.parametrize(
    "error",
    [
        KeyError("kvlink1:ticket"),
        ValueError("invalid literal: 'kvlink1:ticket'"),
        Unexpected("kvlink1:ticket"),
        OSError(2, "No such file", "kvlink1:ticket"),
        UnicodeEncodeError("utf-8", "kvlink1:ticket\ud800", 14, 15, "surrogates not allowed"),
    ],
)
def test_no_value_of_a_request_gets_into_the_log(
    name: str, error: Exception, lines: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    survived(name, raise_(error))
    assert "kvlink1:ticket" not in caplog.text
    assert type(error).__name__ in lines()[0]


def test_texts_without_values_are_shown_and_bounded() -> None:
    assert shown(ConfigError("x" * 1000)) == f"ConfigError: {'x' * 300}…"
    assert shown(AttributeError("no attribute 'y'")) == "AttributeError: no attribute 'y'"
    assert shown(OSError(9, "Bad file descriptor")) == "OSError: Bad file descriptor"


def test_a_log_handler_that_raises_ends_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise Unexpected

    monkeypatch.setattr(supervised._log, "error", refuse)
    survived(name, Unexpected())
    assert failures()[name] == 1


_IMPORTS = """\
import asyncio, socketserver, threading
from asyncio import ensure_future
from threading import Thread as Started, Timer
from kvlink.runtime import supervised
from kvlink.runtime.supervised import guarded, keep_running, start_awaited, start_job, start_loop, start_thread
NAME = "by constant"
"""


def write(root: Path, body: str, name: str = "x", under: str = "kvlink") -> None:
    folder = root / under
    folder.mkdir(exist_ok=True)
    lines = "\n    ".join(body.splitlines())
    (folder / f"{name}.py").write_text(
        f"{_IMPORTS}\nasync def function(loop, tg, pool, job, run, future):\n    {lines}\n"
    )


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("asyncio.create_task(job)", "create_task"),
        ("loop.create_task(job)", "create_task"),
        ("start = asyncio.get_running_loop().create_task", "create_task"),
        ("getattr(loop, 'create_task')(job)", "create_task"),
        ("tg.create_task(job)", "create_task"),
        ("async with asyncio.TaskGroup(): pass", "TaskGroup"),
        ("asyncio.ensure_future(job)", "ensure_future"),
        ("ensure_future(job)", "ensure_future"),
        ("asyncio.run_coroutine_threadsafe(job, loop)", "run_coroutine_threadsafe"),
        ("threading.Thread(target=run).start()", "Thread"),
        ("Started(target=run).start()", "Thread"),
        ("class X(threading.Thread): pass", "Thread"),
        ("class X(socketserver.ThreadingMixIn): pass", "ThreadingMixIn"),
        ("Timer(1, run).start()", "Timer"),
        ("pool.submit(run)", "submit"),
        ("loop.run_in_executor(None, run)", "run_in_executor"),
        ("loop.add_reader(0, run)", "add_reader"),
        ("loop.add_writer(0, run)", "add_writer"),
        ("loop.call_soon(run)", "call_soon"),
        ("loop.call_soon_threadsafe(run, guarded)", "call_soon_threadsafe"),
        ("loop.call_later(1, run)", "call_later"),
        ("loop.call_at(1, run)", "call_at"),
        ("future.add_done_callback(run)", "add_done_callback"),
        ("future.add_done_callback(lambda done: guarded('n', run)(done))", "add_done_callback"),
    ],
)
def test_each_way_to_start_work_is_found(tmp_path: Path, body: str, kind: str) -> None:
    write(tmp_path, body)
    assert [(each.path, each.function, each.what) for each in findings(tmp_path)] == [
        ("kvlink/x.py", "function", f"uses {kind}")
    ]
    assert main(tmp_path, ()) == 1
    assert main(tmp_path, ("kvlink/x.py:function",)) == 0
    assert main(tmp_path, ("kvlink/x.py",)) == 0
    assert main(tmp_path, ("kvlink",)) == 0


@pytest.mark.parametrize(
    "body",
    [
        "start_loop('name', run)",
        "supervised.start_job('name', job)",
        "start_thread(NAME, run)",
        "await start_awaited(job)",
        "loop.add_reader(0, guarded('name', run))",
        "loop.call_later(1, supervised.guarded('name', run))",
        "future.add_done_callback(guarded('name', lambda done: run()))",
        "future.add_done_callback(set().discard)",
        "pool.submit(keep_running('name', run))",
        "pool.submit(run).result()",
        "await loop.run_in_executor(None, run)",
        "pool.in_background(job, 'warning', name='name')",
        "thread: threading.Thread | None = None",
        "def inner(thread: threading.Thread) -> threading.Thread: return thread",
    ],
)
def test_what_is_supervised_or_waited_for_is_fine(tmp_path: Path, body: str) -> None:
    write(tmp_path, body)
    assert findings(tmp_path) == []


def test_a_name_is_written_at_the_start_and_belongs_to_one_folder(tmp_path: Path) -> None:
    write(tmp_path, "start_loop(loop.name, run)")
    assert [each.what for each in findings(tmp_path)] == ["starts a loop whose name is not written there"]
    write(tmp_path, "start_loop('one', run)\nstart_job('one', job)")
    assert findings(tmp_path) == []
    write(tmp_path, "start_loop('one', run)", name="y")
    assert findings(tmp_path) == []
    write(tmp_path, "start_loop('one', run)", under="integrations")
    assert [each.what for each in findings(tmp_path)] == [
        "has a loop with the name of kvlink/x.py: one",
    ]


def test_what_is_allowed_in_vain_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "start_loop('one', run)")
    assert main(tmp_path, ("kvlink/x.py:function",)) == 1
    assert capsys.readouterr().out == "tests/supervision.py allows kvlink/x.py:function in vain\n"


def test_the_names_of_loops_are_drawn_from_the_code(tmp_path: Path) -> None:
    write(
        tmp_path,
        "start_loop('one', run)\nstart_thread(NAME, run)\npool.on_loop('two', run)\nstart_awaited(job)",
    )
    assert [each.name for each in loops(tmp_path)] == ["one", "by constant", "two"]
    write(tmp_path, "pass")
    write(tmp_path, "from .x import NAME as ITS_NAME\nstart_loop(ITS_NAME, run)", name="y")
    assert [each.name for each in loops(tmp_path)] == ["by constant"]
    assert {"session", "prefix publisher", "readiness", "etcd watch"} <= {each.name for each in loops()}
