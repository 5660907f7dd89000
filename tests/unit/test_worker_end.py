# SPDX-License-Identifier: Apache-2.0
"""What ends with a worker, and what must not stay behind it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from waiting import eventually

from kvlink import BlockPool, LeaseEnd, LeaseEvent, Ticket, Worker
from kvlink.attempts import Attempts
from kvlink.errors import ConfigError
from kvlink.histogram import Durations
from kvlink.layout import Geometry, dense
from kvlink.traffic import MAX_PATHS, OTHERS, Path, PathCounts, Traffic


@pytest.fixture
def worker() -> Iterator[Worker]:
    layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
    with Worker(BlockPool.allocate(layout), "worker", transports="loopback") as made:
        yield made


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
    assert worker.figures().pinned_blocks == 0


def test_the_control_thread_loads_nothing_when_the_process_ends() -> None:
    program = "import sys, kvlink.control.thread; print('concurrent.futures.thread' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout == "True\n"


def test_owners_that_are_gone_make_room() -> None:
    traffic = Traffic()
    live = Path("oldest", "tcp")
    traffic.live = lambda: {live}
    traffic.tally(*live)
    for number in range(MAX_PATHS + 50):
        traffic.tally(f"owner-{number}", "tcp")
    counts = traffic.counts()
    assert {live, Path(f"owner-{MAX_PATHS + 49}", "tcp"), Path(OTHERS, "tcp")} <= counts.keys()
    assert Path("owner-0", "tcp") not in counts
    assert traffic.path("owner-0", "tcp") == Path(OTHERS, "tcp")
    assert len(counts) == MAX_PATHS + 1


def test_an_owner_that_is_connected_again_is_not_the_oldest() -> None:
    traffic = Traffic()
    for number in (*range(MAX_PATHS), 0, MAX_PATHS):
        traffic.tally(f"owner-{number}", "tcp")
    assert Path("owner-0", "tcp") in traffic.counts()
    assert Path("owner-1", "tcp") not in traffic.counts()


def test_with_more_owners_than_paths_new_ones_share_one() -> None:
    traffic = Traffic()
    paths = [Path(f"owner-{number}", "tcp") for number in range(MAX_PATHS + 2)]
    traffic.live = lambda: paths
    tallies = [traffic.tally(*path) for path in paths]
    assert tallies[-1] is tallies[-2]
    assert Path(OTHERS, "tcp") in traffic.counts()


def test_counts_of_two_paths() -> None:
    def counts(factor: int, failed: dict[str, int]) -> PathCounts:
        durations = [Durations() for _ in range(5)]
        for index, each in enumerate(durations):
            each.add(1000 * factor * (index + 1))
        return PathCounts._make([*(factor * number for number in range(1, 7)), failed, *durations])

    both = counts(1, {"StaleBlocks": 1}).plus(counts(10, {"StaleBlocks": 2, "Cancelled": 1}))
    assert both[:6] == (11, 22, 33, 44, 55, 66)
    assert both.failed == {"StaleBlocks": 3, "Cancelled": 1}
    assert [each.sum_ns for each in both[7:]] == [11_000 * factor for factor in range(1, 6)]


def test_failed_attempts_are_forgotten_after_a_while() -> None:
    attempts = Attempts()
    assert not attempts.forgotten(1e9)
    attempts.failed("refused", 100.0, 100.0, silent=False)
    assert not attempts.forgotten(attempts.not_before + 59)
    assert attempts.forgotten(attempts.not_before + 61)
