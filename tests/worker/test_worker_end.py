# SPDX-License-Identifier: Apache-2.0
"""Everything of a worker ends with it, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from descriptors import descriptors, opened_since
from waiting import eventually

from kvlink import BlockPool, LeaseEnd, LeaseEvent, Ticket, Worker, _core
from kvlink.errors import Cancelled, ConfigError, UnknownRequest
from kvlink.layout import Geometry, dense
from kvlink.runtime.durations import Durations
from kvlink.transfer.engine import CompletionQueue
from kvlink.transfer.path_stats import MAX_PATHS, OTHERS, AllPathStats, Path, PathCounts
from kvlink.transfer.reconnect import ReconnectBackoff


@pytest.fixture
def worker() -> Iterator[Worker]:
    layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
    with Worker(BlockPool.allocate(layout), "worker", transports="loopback") as made:
        yield made


def test_a_worker_of_before_a_fork_is_refused_and_what_it_had_is_kept(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the child nothing of it may run, not even a destructor: its threads, and the locks they held, are gone."""
    kept: list[object] = []
    monkeypatch.setattr("kvlink.transfer.engine._abandoned", kept)
    engine = worker._engine
    parents = engine._core, engine.channel
    engine._abandon()
    try:
        assert kept == list(parents)
        with pytest.raises(ConfigError, match="made before a fork"):
            _ = engine.core
    finally:
        engine._core, engine.channel = parents


async def test_events_end_with_the_worker(worker: Worker) -> None:
    seen: list[LeaseEvent] = []

    async def watch() -> None:
        async for event in worker.watch_events():
            seen.append(event)  # noqa: PERF401

    watching = [asyncio.create_task(watch()) for _ in range(2)]
    worker.offer("aborted", [1])
    worker.abort("aborted")
    while not seen:
        await asyncio.sleep(0)
    await asyncio.to_thread(worker.close)
    await asyncio.gather(*watching)
    assert [event.how for event in seen] == [LeaseEnd.ABORTED]
    assert [event async for event in worker.watch_events()] == []


def test_events_in_a_thread(worker: Worker) -> None:
    seen: list[LeaseEvent] = []
    thread = threading.Thread(target=lambda: seen.extend(worker.watch_events_blocking()))
    thread.start()
    worker.offer("aborted", [1])
    worker.abort("aborted")
    eventually(lambda: not len(worker.offers))
    worker.close()
    thread.join()
    assert [event.request_id for event in seen] == ["aborted"]


def test_events_in_a_thread_that_waits_no_longer(worker: Worker) -> None:
    assert list(worker.watch_events_blocking(0)) == []
    worker.offer("aborted", [1])
    worker.abort("aborted")
    assert [event.request_id for event in worker.watch_events_blocking(0)] == ["aborted"]
    with pytest.raises(ConfigError, match="timeout_s"):
        worker.watch_events_blocking(-1)


def test_watchers_that_are_gone_leave_nothing(worker: Worker) -> None:
    before = descriptors()
    for number in range(3):
        worker.offer(f"request-{number}", [1])
        worker.abort(f"request-{number}")
        assert next(worker.watch_events_blocking()).request_id == f"request-{number}"
    assert not opened_since(before)
    assert not worker._engine._notified


def test_a_watcher_that_is_gone_is_told_nothing(worker: Worker) -> None:
    queue = CompletionQueue()
    worker._engine.notify_when_closed(queue)
    del queue
    gc.collect()
    worker.close()
    assert not worker._engine._notified


def test_a_closed_worker_holds_no_descriptors() -> None:
    layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
    pools = BlockPool.allocate(layout), BlockPool.allocate(layout)

    def work() -> list[Worker]:
        workers = [Worker(pool, f"worker-{number}", transports="tcp") for number, pool in enumerate(pools)]
        owner, reader = workers
        assert reader.pull(owner.offer("request", [1, 2]), [3, 4]).wait()
        eventually(lambda: owner.lease_counts().settled == 1)
        for worker in workers:
            worker.close()
        return workers

    closed = work()  # with what the process keeps for all of them
    before = descriptors()
    closed += work()
    assert not opened_since(before)
    assert [worker.lease_counts().settled for worker in closed] == [1, 0, 1, 0]
    assert closed[0].stats().leases.settled == 1


def test_what_a_closed_worker_answers(worker: Worker) -> None:
    worker.offer("request", [1])
    worker.abort("request")
    eventually(lambda: worker.lease_counts().aborted == 1)
    worker.close()
    with pytest.raises(UnknownRequest, match="has ended"):
        worker.set_ready("request", 1)
    assert [event.request_id for event in worker.events()] == ["request"]
    with pytest.raises(ConfigError, match="closed"):
        worker.offer("late", [2])
    worker.close()


def test_a_constructor_that_failed_is_told_of_once() -> None:
    program = (
        "from kvlink import BlockPool, Worker, WorkerConfig\n"
        "from kvlink.layout import Geometry, dense\n"
        "layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))\n"
        "pool = BlockPool.allocate(layout)\n"
        "Worker(pool, 'worker', config=WorkerConfig(transports='loopback', token_file='/no/such/file'))\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError: cannot read the token" in output.stderr
    assert output.stderr.count("Traceback") == output.stderr.count("direct cause") + 1
    assert "Exception ignored" not in output.stderr


def test_a_second_close_waits_for_the_first(worker: Worker) -> None:
    begun, go, order = threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        go.wait()
        order.append("closed")

    def close_too() -> None:
        worker.close()
        order.append("second")

    worker._opened.callback(hold)
    first, second = threading.Thread(target=worker.close), threading.Thread(target=close_too)
    first.start()
    begun.wait()
    second.start()
    second.join(0.05)
    go.set()
    first.join()
    second.join()
    assert order == ["closed", "second"]


def test_a_close_within_a_close(worker: Worker) -> None:
    worker._opened.callback(worker.close)  # as a signal handler does that comes in the middle
    worker.close()
    assert "closed" in repr(worker)


def test_a_ticket_that_cannot_be_signed_holds_no_lease(worker: Worker) -> None:
    def refuse(ticket: Ticket) -> Ticket:
        raise ConfigError("the key file is gone")

    sign, worker.offers.sign = worker.offers.sign, refuse
    for _ in range(3):
        with pytest.raises(ConfigError, match="key file"):
            worker.offer("request", [1, 2])
    worker.offers.sign = sign
    worker.offer("request", [1, 2])
    eventually(lambda: worker.events() == [] and worker.lease_counts().active == 1)
    worker.abort("request")
    events = eventually(worker.events)
    assert [(event.request_id, event.how) for event in events] == [("request", LeaseEnd.ABORTED)]
    assert worker.stats().pinned_blocks == 0


def test_the_control_thread_loads_nothing_when_the_process_ends() -> None:
    program = "import sys, kvlink.runtime.background; print('concurrent.futures.thread' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout == "True\n"


def test_owners_that_are_gone_make_room() -> None:
    stats = AllPathStats()
    live = Path("oldest", "tcp")
    stats.is_live = lambda path: path == live
    stats.of_path(*live)
    for number in range(MAX_PATHS + 50):
        stats.of_path(f"owner-{number}", "tcp")
    counts = stats.counts()
    assert {live, Path(f"owner-{MAX_PATHS + 49}", "tcp"), Path(OTHERS, "tcp")} <= counts.keys()
    assert Path("owner-0", "tcp") not in counts
    assert stats.path("owner-0", "tcp") == Path(OTHERS, "tcp")
    assert len(counts) == MAX_PATHS + 1


def test_an_owner_that_is_connected_again_is_not_the_oldest() -> None:
    stats = AllPathStats()
    for number in (*range(MAX_PATHS), 0, MAX_PATHS):
        stats.of_path(f"owner-{number}", "tcp")
    assert Path("owner-0", "tcp") in stats.counts()
    assert Path("owner-1", "tcp") not in stats.counts()


def test_with_more_owners_than_paths_new_ones_share_one() -> None:
    stats = AllPathStats()
    paths = [Path(f"owner-{number}", "tcp") for number in range(MAX_PATHS + 2)]
    stats.is_live = lambda path: path in paths
    tallies = [stats.of_path(*path) for path in paths]
    assert tallies[-1] is tallies[-2]
    assert Path(OTHERS, "tcp") in stats.counts()


def test_counts_of_two_paths() -> None:
    def counts(factor: int, failed: dict[str, int]) -> PathCounts:
        durations = [Durations() for _ in range(5)]
        for index, each in enumerate(durations):
            each.add(1000 * factor * (index + 1))
        stale = Counter({(True, 4): failed["StaleBlocks"]})
        return PathCounts._make(
            [*(factor * number for number in range(1, 8)), Counter(failed), stale, *durations]
        )

    both = counts(1, {"StaleBlocks": 1}).plus(counts(10, {"StaleBlocks": 2, "Cancelled": 1}))
    assert both[:7] == (11, 22, 33, 44, 55, 66, 77)
    assert both.failed == {"StaleBlocks": 3, "Cancelled": 1}
    assert both.stale == {(True, 4): 3}
    assert [each.sum_ns for each in both[9:]] == [11_000 * factor for factor in range(1, 6)]


def test_failed_attempts_are_forgotten_after_a_while() -> None:
    attempts = ReconnectBackoff()
    assert not attempts.is_expired(1e9)
    attempts.failed("refused", 100.0, 100.0, silent=False)
    assert not attempts.is_expired(attempts.not_before + 59)
    assert attempts.is_expired(attempts.not_before + 61)


def test_a_worker_drains_when_its_offers_have_ended(worker: Worker) -> None:
    assert worker.drain(0.0)
    ticket = worker.offer("r", [0, 1])
    assert not worker.drain(0.0)
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(worker.drain(60.0)))
    thread.start()
    worker.pull(ticket, [4, 5]).wait(20)
    thread.join()
    assert drained == [True]
    assert [event.how for event in worker.events()] == [LeaseEnd.SETTLED], "draining takes no events"
    worker.offer_soft("soft", [2])
    assert worker.drain(0.0)


def test_closing_does_not_wait_for_an_owner_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner's tcp port accepts, and says nothing. Nothing but close() ends this wait before the hour is over."""
    monkeypatch.setattr("kvlink.transfer.shared_connect._MOST_ATTEMPT_S", 3600.0)
    plain = _core.Engine.open
    layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = struct.pack("<I", silent.getsockname()[1])

        def open_silent(self: _core.Engine, transport: str, address: bytes, *about: Any) -> object:
            """At the owner's address, which ends with the port and eight bytes, and the port of the silent one."""
            return plain(self, transport, address[:-12] + port + address[-8:], *about)

        monkeypatch.setattr(_core.Engine, "open", open_silent)
        with Worker(BlockPool.allocate(layout), "owner", transports="tcp") as owner:
            reader = Worker(BlockPool.allocate(layout), "reader", transports="tcp")
            pull = reader.pull(owner.offer("r", [1]), [2], timeout_s=3600)
            with silent.accept()[0]:  # the reader waits for the owner's word
                reader.close()
            with pytest.raises(Cancelled):
                pull.wait()
