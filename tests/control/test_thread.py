# SPDX-License-Identifier: Apache-2.0
"""The control thread from synchronous code, at interpreter exit and after fork."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from control.processes import CoordinatorProcess
from waiting import eventually

from kvlink.control import CoordinatorClient
from kvlink.coordinator import Coordinator
from kvlink.errors import ConfigError, CoordinatorUnavailable
from kvlink.runtime.background import ControlThread, close_all, close_with_loop
from kvlink.runtime.supervised import failures


def test_it_runs_coroutines_for_other_threads() -> None:
    thread = ControlThread("kvlink-test")

    async def where() -> str:
        return threading.current_thread().name

    assert thread.run(where()) == "kvlink-test"
    assert repr(thread) == "ControlThread(kvlink-test, running)"
    thread.close()
    thread.close()
    assert repr(thread) == "ControlThread(kvlink-test, closed)"
    with pytest.raises(ConfigError, match="is closed"):
        thread.run(where())


def test_a_timeout_cancels_the_coroutine() -> None:
    thread, cancelled = ControlThread(), threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with pytest.raises(CoordinatorUnavailable, match=r"did not finish within 0\.05 s"):
        thread.run(endless(), timeout_s=0.05)
    assert cancelled.wait(20)
    thread.close()


def test_closing_cancels_what_runs() -> None:
    thread, started, cancelled = ControlThread(), threading.Event(), threading.Event()

    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    future = thread.submit(endless())
    assert started.wait(20)
    thread.close()
    assert cancelled.is_set()
    assert future.cancelled()


def test_errors_and_timeouts_of_the_coroutine_are_its_own() -> None:
    thread = ControlThread()

    async def fail() -> None:
        raise asyncio.TimeoutError("mine")

    with pytest.raises(asyncio.TimeoutError, match="mine"):
        thread.run(fail(), timeout_s=10)
    thread.close()


def test_it_does_not_wait_for_itself() -> None:
    thread = ControlThread()

    async def nested() -> None:
        thread.run(asyncio.sleep(0))

    with pytest.raises(ConfigError, match="await the coroutine instead"):
        thread.run(nested())
    thread.close()


class Unexpected(Exception):
    """No code knows it."""


async def fails(error: Exception) -> None:
    raise error


def test_jobs_that_no_caller_waits_for_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    thread, before = ControlThread(), failures().get("control job", 0)
    for error in (CoordinatorUnavailable("it is down"), Unexpected("a secret")):
        future = thread.in_background(fails(error), "publish failed request=r")
        eventually(future.done)
    eventually(lambda: failures()["control job"] == before + 1)
    warnings = [each.getMessage() for each in caplog.records if each.name == "kvlink.worker"]
    assert warnings == [
        "publish failed request=r error=CoordinatorUnavailable: it is down",
        "publish failed request=r error=Unexpected",
    ]
    assert "a secret" not in caplog.text
    thread.close()


def test_a_loop_runs_on_it_until_its_future_is_cancelled() -> None:
    thread, runs = ControlThread(), itertools.count()
    last, ended = threading.Event(), threading.Event()

    async def run() -> None:
        if next(runs) < 2:
            raise Unexpected
        last.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = thread.keep_running("a loop of a test", run)
    assert last.wait(20)
    future.cancel()
    assert ended.wait(20)
    assert failures()["a loop of a test"] == 2
    thread.close()


def test_a_call_on_it_survives_and_is_dropped_after_it_was_closed() -> None:
    thread, called = ControlThread(), threading.Event()

    def fail() -> None:
        raise Unexpected

    thread.on_loop("a call of a test", fail)
    thread.on_loop("a call of a test", called.set)
    assert called.wait(20)
    assert failures()["a call of a test"] == 1
    thread.close()
    called.clear()
    thread.on_loop("a call of a test", called.set)
    assert not called.is_set()


async def test_one_object_that_does_not_close_leaves_no_other_open() -> None:
    class Server:
        closed = False

        async def close(self) -> None:
            self.closed = True

    class Broken(Server):
        async def close(self) -> None:
            raise Unexpected

    servers = [Server(), Broken(), Server()]
    for server in servers:
        close_with_loop(server)
    await close_all()
    assert [server.closed for server in servers] == [True, False, True]


def test_servers_and_clients_live_on_it() -> None:
    thread = ControlThread()

    async def start() -> tuple[Coordinator, CoordinatorClient]:
        coordinator = Coordinator()
        return coordinator, CoordinatorClient(await coordinator.start())

    coordinator, client = thread.run(start())
    assert thread.run(client.status(), 10).workers == 0
    thread.run(client.close(), 10)
    thread.run(coordinator.close(), 10)
    thread.close()


def python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "import gc; gc.collect()"])
def test_interpreter_exit_with_everything_open_is_silent(
    coordinator_process: Callable[..., CoordinatorProcess], ending: str
) -> None:
    done = python(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from control.cards import make_card
        from kvlink.runtime.background import ControlThread
        from kvlink.control import *
        thread = ControlThread()
        async def start():
            client = CoordinatorClient({coordinator_process().address!r})
            agent = WorkerAgent(lambda *a: (1, []), lambda *a: True, lambda *a: True)
            await agent.start()
            session = await Session.join(client, make_card(agent=agent.address), print)
            stream = client.handoffs()
            claim = stream.claim(Claim("r", 60.0))
            return client, agent, session, stream, claim
        everything = thread.run(start())
        waiting = thread.submit(everything[0].claim("r", 60.0))
        {ending}
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_forked_child_is_told_and_exits_cleanly() -> None:
    done = python(
        """
        import asyncio, os, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
        from kvlink.runtime.background import ControlThread
        thread = ControlThread()
        thread.run(asyncio.sleep(0))
        child = os.fork()
        if child == 0:
            try:
                thread.run(asyncio.sleep(0))
            except Exception as error:
                print(type(error).__name__, error, flush=True)
            print(thread, flush=True)
            thread.close()
        else:
            assert os.waitpid(child, 0)[1] == 0
            thread.run(asyncio.sleep(0))
            thread.close()
        """
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("ConfigError this process was forked from ")
    assert "spawn or forkserver, or fork before the first Worker" in first
    assert second == "ControlThread(kvlink-control, of another process)"


def test_control_imports_neither_torch_nor_the_data_plane() -> None:
    done = python(
        """
        import sys
        import kvlink.control
        print([name for name in ("torch", "kvlink._core", "numpy", "transformers") if name in sys.modules])
        """
    )
    assert done.stdout == "[]\n", done.stderr
