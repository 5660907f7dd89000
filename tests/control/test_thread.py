# SPDX-License-Identifier: Apache-2.0
"""The control thread from synchronous code, at interpreter exit and after fork."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from control.processes import CoordinatorProcess

from kvlink.background import ControlThread
from kvlink.control import CoordinatorClient
from kvlink.coordinator import Coordinator
from kvlink.errors import ConfigError, CoordinatorUnavailable


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
        from kvlink.background import ControlThread
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
        from kvlink.background import ControlThread
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
