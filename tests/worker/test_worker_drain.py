# SPDX-License-Identifier: Apache-2.0
"""A worker that drains says so to everyone, and SIGTERM lets a program drain."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transports.pools import PoolSpec

from kvlink import Termination, Ticket, Worker, WorkerConfig
from kvlink.control import AgentClient, CoordinatorClient
from kvlink.control.security import Caller, set_caller
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorUnavailable, KVLinkError
from kvlink.hardware.host_identity import this_host
from kvlink.integrations.router.commands.drain import _drain_workers, drain, draining, is_here, is_within
from kvlink.types import WorkerCard


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(MemoryStore(60.0), lease_s=0.6)  # beats come often, and nobody is lost
    await coordinator.start()
    yield coordinator
    await coordinator.close()


@pytest.fixture
async def client(coordinator: Coordinator) -> AsyncIterator[CoordinatorClient]:
    async with CoordinatorClient(coordinator.address) as client:
        yield client


@pytest.fixture
async def worker(coordinator: Coordinator) -> AsyncIterator[Worker]:
    config = WorkerConfig(transports="loopback", coordinator=coordinator.address)
    worker = await asyncio.to_thread(Worker, PoolSpec().make(), "prefill-0", config=config)
    yield worker
    await asyncio.to_thread(worker.close)


async def test_everyone_is_told_once(worker: Worker, client: CoordinatorClient) -> None:
    watching = client.watch()
    await anext(watching)
    await asyncio.to_thread(worker.offer, "r", [1], publish=True)
    await client.claim("r", timeout_s=10.0)
    assert not worker.stats().draining
    for _ in range(2):
        assert not await asyncio.to_thread(worker.drain, 0.0)
    change = await anext(watching)
    assert change.card == replace(worker.card, draining=True)
    assert (await client.status()).draining == 1
    assert (await client.status()).joined == 2
    (view,) = (await client.overview()).workers
    assert view.draining
    async with AgentClient(worker.card.agent) as agent:
        assert (await agent.card()).draining
    assert worker.stats().draining


async def test_a_worker_that_rejoins_still_drains(
    worker: Worker, client: CoordinatorClient, coordinator: Coordinator
) -> None:
    await asyncio.to_thread(worker.drain, 0.0)
    while not (await client.workers())[0].draining:
        await asyncio.sleep(0)
    set_caller(Caller(incarnation=worker.card.incarnation))
    await coordinator._store.leave(
        "prefill-0", worker.card.epoch
    )  # the next beat learns that it is not joined
    cards: list[WorkerCard] = []
    while not cards:
        cards = await client.workers()
    assert cards[0].draining


async def test_a_worker_leaves_after_the_coordinator_was_told(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    client = worker._membership._client
    assert client is not None
    join, leave, leave_ports = client.join, client.leave, worker._membership._leave_ports
    leaving = asyncio.Event()

    async def slow_join(*given: Any, **named: Any) -> Any:
        await leaving.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        calls.append("join")
        return await join(*given, **named)

    async def noted_leave(*given: Any, **named: Any) -> None:
        calls.append("leave")
        await leave(*given, **named)

    def begins_to_leave() -> None:
        leaving.set()
        leave_ports()

    monkeypatch.setattr(worker._membership, "_leave_ports", begins_to_leave)
    monkeypatch.setattr(client, "join", slow_join)
    monkeypatch.setattr(client, "leave", noted_leave)
    await asyncio.to_thread(worker.drain, 0.0)
    await asyncio.to_thread(worker.close)
    assert calls == ["join", "leave"]


async def test_kvlink_drain_waits_for_a_workers_readers(worker: Worker, coordinator: Coordinator) -> None:
    def drained(name: str, process: int, grace_s: float) -> list[tuple[str, str, int]]:
        rows = _drain_workers(name, process, coordinator.address, 0.0, grace_s)
        return [(row["server"], row["state"], row["running"]) for row in rows]

    ticket = worker.offer("r", [1])
    assert await asyncio.to_thread(drained, "prefill-0", 0, 0.0) == [("prefill-0", "draining", 1)]
    pulled = await asyncio.to_thread(lambda: worker.pull(ticket, [2]).wait(10))
    assert pulled
    for process in (os.getpid(), os.getppid()):
        assert await asyncio.to_thread(drained, "", process, 60.0) == [("prefill-0", "draining", 0)]
    assert await asyncio.to_thread(drained, "", 2**22 + 1, 60.0) == []


async def test_kvlink_drain_ends_with_the_worker(worker: Worker) -> None:
    def looks() -> list[tuple[str, int]]:
        with draining([worker.card]) as look:
            (before,) = look()
            worker.close()
            (after,) = look()
        return [(row["state"], row["running"]) for row in (before, after)]

    worker.offer("r", [1])
    assert await asyncio.to_thread(looks) == [("draining", 1), ("ended", 0)]
    with pytest.raises(CoordinatorUnavailable, match="worker agent"):
        await asyncio.to_thread(looks)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "only one of them"),
        ({"what": "prefill-0", "process": 1}, "only one of them"),
        ({"what": "prefill-0", "resume": True}, "--resume is for servers of a router"),
    ],
)
def test_kvlink_drain_says_what_it_needs(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        drain(**given)


async def test_offers_that_are_left_are_an_error(worker: Worker, coordinator: Coordinator) -> None:
    worker.offer("r", [1])
    with pytest.raises(KVLinkError, match="1 offers still wait for readers at prefill-0 after 0 s"):
        await asyncio.to_thread(drain, "prefill-0", coordinator=coordinator.address, grace_s=0.0)


def test_processes_are_those_of_this_place() -> None:
    parents = {30: 20, 20: 10, 10: 1, 1: 0}
    assert [is_within(pid, 20, lambda pid: parents.get(pid, 0)) for pid in (30, 20, 10, 1, 99)] == [
        True,
        True,
        False,
        False,
        False,
    ]
    here = this_host()
    assert is_here(replace(here, pid=99), here)
    assert not is_here(replace(here, boot_id="another host"), here)
    assert not is_here(replace(here, pid_namespace=5), here)
    hidden = replace(here, pid_namespace=0)
    assert not is_here(hidden, hidden)


@pytest.fixture
def noted() -> Iterator[list[int]]:
    """The SIGTERMs that reach the program's own handler."""
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def test_the_first_sigterm_is_noted_and_the_second_ends_the_process(noted: list[int]) -> None:
    with Termination() as ending:
        assert not ending.wait(0.0)
        signal.raise_signal(signal.SIGTERM)
        assert ending.asked
        assert ending.wait()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert noted == []
    signal.raise_signal(signal.SIGTERM)
    assert noted == [signal.SIGTERM], "the program's own handler is back"


def test_sigterm_ends_a_wait(noted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = select.poll

    class Arriving:
        """The signal arrives when the wait has begun."""

        def __init__(self) -> None:
            self._poll = plain()
            self.register = self._poll.register

        def poll(self, timeout_ms: float | None) -> list[tuple[int, int]]:
            signal.raise_signal(signal.SIGTERM)
            ready = self._poll.poll(0)
            assert ready, "the wait would go on"
            return ready

    monkeypatch.setattr(select, "poll", Arriving)
    with Termination() as ending:
        assert ending.wait()


_PROGRAM = """
import kvlink
from transports.pools import PoolSpec
with kvlink.Worker(PoolSpec().make(), "owner") as worker, kvlink.Termination() as ending:
    print(worker.offer("r", [1]).to_text(), flush=True)
    ending.wait()
    print(worker.drain(60.0), flush=True)
"""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """A program whose offer waits for its reader."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


@pytest.mark.verify
def test_a_program_ends_when_its_offers_were_read(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    ticket = Ticket.from_text(program.stdout.readline().strip())
    program.send_signal(signal.SIGTERM)
    with Worker(PoolSpec().make(), "reader") as reader:
        reader.pull(ticket, [2]).wait(30.0)
    assert program.stdout.readline() == "True\n"
    assert program.wait(30.0) == 0


@pytest.mark.verify
def test_a_second_sigterm_ends_a_program_that_drains(program: subprocess.Popen[str]) -> None:
    assert program.stdout is not None
    program.stdout.readline()
    program.send_signal(signal.SIGTERM)
    while (ignored := Path(f"/proc/{program.pid}/status").read_text()) and _catches_sigterm(ignored):
        time.sleep(0.01)
    program.send_signal(signal.SIGTERM)
    assert program.wait(30.0) == -signal.SIGTERM


def _catches_sigterm(status: str) -> bool:
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
