# SPDX-License-Identifier: Apache-2.0
"""Outages of real processes: crowds, full disks, clocks that jump, and what is killed or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster, need_etcdctl
from outages.programs import Coordinator, LoadProcess, Program
from outages.scene import Scene, make_token, on_loopback, secrets_of, ticket_secret
from waiting import eventually

from kvlink.config.addresses import split_address
from kvlink.control import CoordinatorClient, Session

pytestmark = pytest.mark.timeout(300)

_HERD = 1_000
_GROWTH_MIB = 60.0

_WATCH = """
import asyncio, sys
from kvlink.control import CoordinatorClient
async def one(client):
    async for change in client.watch():
        if change.card.worker_id == "last":
            return
async def main():
    clients = [CoordinatorClient(sys.argv[1]) for _ in range(int(sys.argv[2]))]
    tasks = [asyncio.create_task(one(client)) for client in clients for _ in range(5)]
    await asyncio.sleep(2)
    print("watching", flush=True)
    await asyncio.gather(*tasks)
    print("seen", flush=True)
asyncio.run(main())
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path, "a", "memory", (), "--http-port", "0")
    yield coordinator
    coordinator.kill()


async def test_a_herd_joins_again_at_once(coordinator: Coordinator) -> None:
    clients = [CoordinatorClient(coordinator.address, timeout_s=60.0) for _ in range(_HERD)]
    cards = [make_card(f"w{number}", process=number + 1) for number in range(_HERD)]
    sessions = [
        await Session.join(client, card, lambda slot, nonce: None, 60.0)
        for client, card in zip(clients, cards, strict=True)
    ]
    for number, session in enumerate(sessions):
        await session.offer(make_offer(f"r{number}", f"w{number}", session.card.epoch, ttl_s=250.0))
    before_mib, before_lines = coordinator.memory_mib(), coordinator.num_lines()
    coordinator.kill()
    coordinator.start()
    began = time.monotonic()
    async with CoordinatorClient(coordinator.address, timeout_s=60.0) as asking:
        longest_s = 0.0
        while (status := await asking.status()).workers < _HERD or status.tickets < _HERD:
            asked = time.monotonic()
            await asking.status()
            longest_s = max(longest_s, time.monotonic() - asked)
            await asyncio.sleep(0.05)
        took_s = time.monotonic() - began
        for number in range(0, _HERD, 20):
            ticket = make_offer(f"r{number}", f"w{number}", sessions[number].card.epoch).ticket
            assert await asking.claim(f"r{number}", timeout_s=30.0) == [ticket]
    lines, mib = coordinator.num_lines() - before_lines, coordinator.memory_mib()
    print(
        f"\n    all back in {took_s:.1f} s, status at most {longest_s:.2f} s, {lines} lines, {mib:.0f} MiB",
        end=" ",
    )
    assert [session.num_rejoins for session in sessions] == [1] * _HERD
    assert lines <= _HERD + 10, "one for each that joins"
    assert mib < before_mib + _GROWTH_MIB
    assert "Traceback" not in coordinator.logged
    await asyncio.gather(*(session.close() for session in sessions))
    await asyncio.gather(*(client.close() for client in clients))


async def test_watchers_that_do_not_read_cost_little_and_see_the_end(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    """Changes are not kept for ever for them: their watch begins again, and sees what is so then."""
    command = [sys.executable, "-c", _WATCH, coordinator.address, "10"]
    watching = Program(tmp_path, "watching", command)
    try:
        watching.send(signal.SIGSTOP)
        before_mib, before_lines = coordinator.memory_mib(), coordinator.num_lines()
        async with CoordinatorClient(coordinator.address, timeout_s=60.0) as client:
            for number in range(600):
                joined = await client.join(make_card(f"w{number}", process=number + 1))
                if number == 299:
                    half_mib = coordinator.memory_mib()
                await client.leave(f"w{number}", joined.epoch)
            grown_mib, more_mib = half_mib - before_mib, coordinator.memory_mib() - half_mib
            watching.send(signal.SIGCONT)
            last = await Session.join(
                client, make_card("last", process=99_999), lambda slot, nonce: None, 60.0
            )
            assert await asyncio.to_thread(watching.line, 60.0) == "seen"
            await last.close()
    finally:
        watching.kill()
    print(f"\n    +{grown_mib:.1f} MiB by 600 changes, +{more_mib:.1f} MiB by 600 more", end=" ")
    assert grown_mib < _GROWTH_MIB
    assert more_mib < 10.0
    assert coordinator.num_lines() - before_lines <= 1_210, "one for each that joins or leaves"


async def test_slow_http_clients_keep_neither_scrapes_nor_handoffs_waiting(coordinator: Coordinator) -> None:
    lines = coordinator.num_lines()
    with ExitStack() as stack:
        slow = [
            stack.enter_context(
                socket.create_connection(split_address(coordinator.page.removeprefix("http://")))
            )
            for _ in range(400)
        ]
        for each in slow:
            each.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        took: list[float] = []
        async with CoordinatorClient(coordinator.address, timeout_s=60.0) as client:
            await client.join(make_card())
            for number in range(20):
                began = time.monotonic()
                await asyncio.to_thread(scrape, coordinator.page)
                took.append(time.monotonic() - began)
                await client.offer(make_offer(f"r{number}"))
                assert await client.claim(f"r{number}", timeout_s=30.0)
    print(f"\n    a scrape took at most {max(took):.2f} s", end=" ")
    assert max(took) < 5.0
    assert coordinator.num_lines() - lines <= 15
    assert "Traceback" not in coordinator.logged


def scrape(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        assert b"kvlink_coordinator_workers" in answer.read()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of which etcd's log takes most."""
    if os.geteuid() != 0:
        pytest.skip("a small disk is a tmpfs, and mounting needs root: sudo make test-processes")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "kvlink-test", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


class Disk:
    """Holds the data of one member. `fill` fills it until that member ends, `heal` empties it and starts the member."""

    def __init__(self, root: Path, etcd: EtcdCluster, number: int) -> None:
        self._ballast, self._etcd, self._number = root / "ballast", etcd, number

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        pid = self._etcd.pids[self._number]
        with contextlib.suppress(subprocess.CalledProcessError):
            while not ended(pid):
                self._etcd.control("put", "more", "x" * 100_000)
        eventually(lambda: ended(pid))

    def heal(self) -> None:
        self._etcd.kill(self._number)
        self._ballast.unlink()
        self._etcd.start(self._number)
        self._etcd.wait()


def test_the_disk_of_a_single_etcd_is_full(small_disk: Path, tmp_path: Path) -> None:
    """The members' calls wait or are refused as retryable while etcd is down."""
    need_etcdctl()
    with on_loopback(tmp_path, 1) as (scene, etcd):
        move(etcd, 0, small_disk)
        disk = Disk(small_disk, etcd, 0)
        seen = scene.disturb(disk.fill, disk.heal, 8.0)
    assert set(seen.totals.refused) <= {"CoordinatorUnavailable"}
    assert seen.within(20.0)


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_the_disk_of_one_member_of_three_is_full(small_disk: Path, tmp_path: Path, leads: bool) -> None:
    """The other two members go on."""
    need_etcdctl()
    with on_loopback(tmp_path, 3) as (scene, etcd):
        number = etcd.leader() if leads else (etcd.leader() + 1) % 3
        move(etcd, number, small_disk)
        if leads:
            etcd.lead(number)
        assert (etcd.leader() == number) == leads
        disk = Disk(small_disk, etcd, number)
        seen = scene.disturb(disk.fill, disk.heal, 8.0)
    assert not seen.totals.refused
    assert seen.within(8.0)


def move(etcd: EtcdCluster, number: int, disk: Path) -> None:
    """Moves the data of one member to another file system."""
    etcd.kill(number)
    data = etcd.data(number)
    shutil.move(data, disk / "data")
    data.symlink_to(disk / "data")
    etcd.start(number)
    etcd.wait()


def ended(pid: int) -> bool:
    """It waits to be asked for its status."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


_HOUR = 3600
_SOURCE = Path(__file__).with_name("wall_clock.c")


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns the library to preload, and the file that moves the clock."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine: apt-get install gcc")
    folder = tmp_path_factory.mktemp("clock")
    library, file = folder / "wall_clock.so", folder / "shift"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, _SOURCE], check=True)
    file.write_text("0\n")
    return str(library), file


@pytest.fixture(scope="module")
def scene(clock: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One coordinator in memory, whose leases and tickets are by its own clock."""
    folder = tmp_path_factory.mktemp("logs")
    token = make_token(folder)
    env = {"KVLINK_TOKEN_FILE": str(token), "LD_PRELOAD": clock[0], "WALL_CLOCK_FILE": str(clock[1])}
    programs: list[Program] = []
    try:
        programs.append(Coordinator(folder, "a", "memory", (), "--lease-s", "20", **env))
        address = programs[0].first_line.rpartition(" ")[2]
        load = LoadProcess(folder, address, ticket_secret(token), **env)
        programs.append(load)
        yield Scene(folder, programs[:-1], load, secrets_of(token))
    finally:
        for program in programs:
            program.kill()


@pytest.mark.parametrize("by_s", [_HOUR, -2 * _HOUR, 10 * 365 * 24 * _HOUR], ids=["hour", "back", "decade"])
def test_nothing_is_lost_and_nobody_joins_again(scene: Scene, clock: tuple[str, Path], by_s: int) -> None:
    def to(shift: int) -> None:
        clock[1].write_text(f"{shift}\n")

    seen = scene.disturb(lambda: to(by_s), lambda: to(0), 4.0, lines=5)
    assert not seen.totals.refused
    assert seen.totals.rejoins == 0
    assert seen.within(1.0)


def test_the_clock_does_move(clock: tuple[str, Path]) -> None:
    """The preloaded library works: other tests of this file would pass without it."""
    clock[1].write_text(f"{10 * _HOUR}\n")
    program = "import time, datetime; print(time.time() - 36000, datetime.datetime.now().timestamp() - 36000)"
    env = {"LD_PRELOAD": clock[0], "WALL_CLOCK_FILE": str(clock[1])}
    output = subprocess.run(
        ["python3", "-c", program], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True
    )
    clock[1].write_text("0\n")
    assert output.returncode == 0, output.stderr
    assert all(abs(float(at) - time.time()) < 60 for at in output.stdout.split())


_FOR_S = 6.0
On = tuple[Scene, EtcdCluster]
Ends = Callable[[], object]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[On]:
    with on_loopback(tmp_path_factory.mktemp("logs")) as on:
        yield on


def of_member(etcd: EtcdCluster, leads: bool, stops: bool) -> tuple[Ends, Ends]:
    """How it falls, and how it comes back."""
    leader = etcd.leader()
    number = leader if leads else (leader + 1) % 3
    if stops:
        return partial(etcd.send, number, signal.SIGSTOP), partial(etcd.send, number, signal.SIGCONT)

    def back() -> None:
        etcd.start(number)
        etcd.wait()

    return partial(etcd.kill, number), back


@pytest.mark.parametrize("stops", [True, False], ids=["SIGSTOP", "SIGKILL"])
@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_a_member_of_etcd(on: On, leads: bool, stops: bool) -> None:
    scene, etcd = on
    seen = scene.disturb(*of_member(etcd, leads, stops), _FOR_S)
    assert not seen.totals.refused
    assert seen.within(8.0)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_a_coordinator(on: On, how: signal.Signals) -> None:
    scene, _ = on
    victim = scene.programs[0]
    assert isinstance(victim, Coordinator)

    def back() -> None:
        if how is signal.SIGSTOP:
            victim.send(signal.SIGCONT)
            return
        assert victim.process.wait(timeout=10) == (0 if how is signal.SIGTERM else -how)
        victim.kill()
        victim.start()

    seen = scene.disturb(partial(victim.send, how), back, _FOR_S)
    assert not seen.totals.refused
    assert seen.within(10.0 if how is signal.SIGSTOP else 3.0)


def coordinators_restart(scene: Scene, etcd: EtcdCluster) -> tuple[Ends, Ends]:
    coordinators = scene.programs[:2]
    return lambda: [one.kill() for one in coordinators], lambda: [one.start() for one in coordinators]


def etcd_restarts(scene: Scene, etcd: EtcdCluster) -> tuple[Ends, Ends]:
    def back() -> None:
        for number in range(3):
            etcd.start(number)
        etcd.wait()

    return lambda: [etcd.kill(number) for number in range(3)], back


def one_of_each_stops(scene: Scene, etcd: EtcdCluster) -> tuple[Ends, Ends]:
    """Neither closes its connections."""

    def send(number: signal.Signals) -> None:
        scene.programs[0].send(number)
        etcd.send(0, number)

    return partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT)


@pytest.mark.parametrize("what", [coordinators_restart, etcd_restarts, one_of_each_stops])
def test_several_at_once(on: On, what: Callable[[Scene, EtcdCluster], tuple[Ends, Ends]]) -> None:
    scene, etcd = on
    scene.disturb(*what(scene, etcd), 3.0)
