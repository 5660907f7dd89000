# SPDX-License-Identifier: Apache-2.0
"""The coordinator dies, stops and comes back under load: transfers go on, and workers join again by themselves."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from control.processes import CoordinatorProcess
from transports.lost_time import LostTime
from transports.pairs import Pair
from transports.processes import PATIENCE, eventually

from kvlink import Ticket
from kvlink.control import CoordinatorClient
from kvlink.errors import (
    CoordinatorError,
    CoordinatorUnavailable,
    LeaseExpired,
    StaleBlocks,
    StaleReason,
    UnknownRequest,
)

NewPair = Callable[..., Pair]


@pytest.fixture
def coordinator(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[CoordinatorProcess]:
    """Its parameter is the workers' lease in seconds: a short one is lost where a worker stalls."""
    # A captured warning would keep its exception, that its frames, and those the connection.
    caplog.set_level(logging.ERROR, "kvlink")
    process = CoordinatorProcess(lease_s=getattr(request, "param", 10.0))
    yield process
    process.kill()


class Load:
    """Handoffs whose tickets ride on the router's message, one after the other, on a thread."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stop = threading.Event()
        self.num_done = 0
        self.failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._pair.works()
                self.num_done += 1
        except BaseException as error:
            self.failed = error

    def goes_on(self) -> None:
        """Fifty more handoffs end well from now on."""
        wanted = self.num_done + 50
        eventually(lambda: self.num_done >= wanted or self.failed is not None)
        assert self.failed is None

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def pair(distant: str, coordinator: CoordinatorProcess, new_pair: NewPair) -> Pair:
    return new_pair(distant, coordinator=coordinator.address)


@pytest.fixture
def load(pair: Pair) -> Iterator[Load]:
    load = Load(pair)
    yield load
    load.stop()


def claim(pair: Pair, request_id: str, timeout_s: float = 15.0 * PATIENCE) -> None:
    """By id alone."""
    pull = pair.reader.pull(request_id, [30, 31], timeout_s=timeout_s)
    assert pull.wait(30 * PATIENCE)
    assert pair.holds([30, 31], [20, 21])


def test_claims_by_id_bring_the_bytes(pair: Pair) -> None:
    pair.offer([20, 21], request_id="known", publish=True)
    claim(pair, "known")
    assert pair.owner.fate_of("known") == "settled"
    with pytest.raises((UnknownRequest, LeaseExpired)):
        claim(pair, "never offered", timeout_s=0.3 * PATIENCE)
    waiting = pair.reader.pull("later", [30, 31], timeout_s=20 * PATIENCE)
    assert not waiting.wait(0.1)
    pair.offer([20, 21], request_id="later", publish=True)
    assert waiting.wait(20 * PATIENCE)
    assert pair.holds([30, 31], [20, 21])


def test_killed_and_restarted_under_load(pair: Pair, coordinator: CoordinatorProcess, load: Load) -> None:
    load.goes_on()
    pair.offer([20, 21], request_id="before", publish=True)
    claim(pair, "before")
    pair.offer([20, 21], request_id="kept", publish=True, ttl_s=60 * PATIENCE)
    coordinator.kill()
    load.goes_on()
    waiting = pair.reader.pull("kept", [30, 31], timeout_s=30 * PATIENCE)
    with pytest.raises(CoordinatorUnavailable):
        claim(pair, "nobody there", timeout_s=0.5)
    coordinator.start()
    load.goes_on()
    assert waiting.wait(30 * PATIENCE)  # the owner joined again and told of the offers that still live
    assert pair.holds([30, 31], [20, 21])
    pair.offer([20, 21], request_id="after", publish=True)
    claim(pair, "after")
    load.goes_on()


@pytest.mark.parametrize("coordinator", [2.0], indirect=True)
def test_stopped_and_continued_under_load(pair: Pair, coordinator: CoordinatorProcess, load: Load) -> None:
    load.goes_on()
    coordinator.send(signal.SIGSTOP)
    load.goes_on()
    with LostTime() as lost:
        started = time.monotonic()
        with pytest.raises(CoordinatorError):
            claim(pair, "nobody answers", timeout_s=0.5)
        elapsed = time.monotonic() - started - lost.since(started)
    assert elapsed < (1.0 + 2.5) * PATIENCE  # and the slack that a claim has
    coordinator.send(signal.SIGCONT)
    load.goes_on()
    pair.offer([20, 21], request_id="after", publish=True)
    claim(pair, "after")


def test_restarts_in_a_row(pair: Pair, coordinator: CoordinatorProcess, load: Load) -> None:
    for number in range(3):
        coordinator.restart()
        load.goes_on()
        pair.offer([20, 21], request_id=f"life-{number}", publish=True)
        claim(pair, f"life-{number}")


def test_a_rival_that_a_restarted_coordinator_gives_the_ticket_reads_nothing_of_the_ended_lease(
    pair: Pair, coordinator: CoordinatorProcess
) -> None:
    """A coordinator in memory forgets who has claimed. The lease slot does not."""
    ticket = pair.offer([20, 21], request_id="r", publish=True, ttl_s=60 * PATIENCE)
    assert asyncio.run(claim_ticket(coordinator, timeout_s=10.0)) == ticket
    with ThreadPoolExecutor() as threads:
        rival = threads.submit(asyncio.run, claim_ticket(coordinator, timeout_s=30 * PATIENCE))
        coordinator.restart()
        assert rival.result() == ticket, "the owner said it again"
    reader = pair.another_reader("rival")
    try:
        pair.pull(ticket, [30, 31])
        assert pair.owner.fate_of("r") == "settled"
        pull = pair.start(ticket, [30, 31], reader, timeout_s=20)
        with pytest.raises(StaleBlocks) as stale:
            pull.wait(30)
        assert stale.value.why is StaleReason.SETTLED
    finally:
        reader.close()


async def claim_ticket(coordinator: CoordinatorProcess, timeout_s: float) -> Ticket:
    async with CoordinatorClient(coordinator.address) as client:
        (blob,) = await client.claim("r", timeout_s)
    return Ticket.from_bytes(blob)
