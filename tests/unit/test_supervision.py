# SPDX-License-Identifier: Apache-2.0
"""The lint of background work finds each way to start it, and takes what goes through supervised.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from supervision import findings, loops, main

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
