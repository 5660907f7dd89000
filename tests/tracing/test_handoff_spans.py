# SPDX-License-Identifier: Apache-2.0
"""A handoff is one trace: offer, read and settle in the trace of the request that they are for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from tracing.finding import REQUEST, SPAN_ID, TRACE_ID
from tracing.memory import Collected
from transports.pools import PoolSpec

from kvlink import Worker, WorkerConfig
from kvlink.errors import Cancelled, ConfigError, PeerUnreachable, StaleBlocks
from kvlink.tracing import TraceParent


@contextmanager
def pair(fault: str = "") -> Iterator[tuple[Worker, Worker]]:
    """An owner, and a reader with a plan of faults."""
    config = WorkerConfig(transports="loopback")
    reading = WorkerConfig(transports="fault+loopback" if fault else "loopback", fault=fault)
    with (
        Worker(PoolSpec().make(), "prefill", config=config) as owner,
        Worker(PoolSpec().make(), "decode", config=reading) as reader,
    ):
        yield owner, reader


@pytest.fixture
def workers(collected: Collected) -> Iterator[tuple[Worker, Worker]]:
    with pair() as workers:
        yield workers


def test_offer_read_settle(workers: tuple[Worker, Worker], collected: Collected) -> None:
    owner, reader = workers
    before_ns = time.time_ns()
    ticket = owner.offer("r1", range(4), trace=REQUEST)
    pull = reader.pull(ticket, range(4))
    assert pull.wait(10)
    assert pull.wait(10), "asking again tells nothing again"
    offer, connect, read, settle = map(
        collected.one, ("kvlink.offer", "kvlink.connect", "kvlink.read", "kvlink.settle")
    )
    assert (offer.trace, offer.parent, offer.kind) == (TRACE_ID, SPAN_ID, "PRODUCER")
    assert offer.attributes == {"kvlink.request_id": "r1", "kvlink.peer": "prefill", "kvlink.blocks": 4}
    assert connect.within(offer)
    assert read.within(offer)
    assert settle.within(read)
    about = {"kvlink.request_id": "r1", "kvlink.peer": "prefill", "kvlink.transport": "loopback"}
    assert settle.attributes == about
    assert about.items() <= read.attributes.items()
    stats = pull.stats
    assert read.attributes["kvlink.bytes"] == stats.num_bytes > 0
    assert read.attributes["kvlink.operations"] == stats.num_ops > 0
    assert read.attributes["kvlink.descriptors"] == stats.num_segments > 0
    assert read.attributes["kvlink.read_us"] == pytest.approx(stats.read_us)
    assert settle.ended_ns - read.began_ns == pytest.approx(stats.total_us * 1e3, abs=2)
    assert settle.ended_ns - settle.began_ns == pytest.approx(stats.settle_us * 1e3, abs=2)
    assert before_ns <= offer.began_ns <= offer.ended_ns <= read.ended_ns == settle.began_ns <= time.time_ns()
    assert not [span.failed for span in (offer, connect, read, settle) if span.failed]


def test_a_warm_pull_on_the_callers_thread(workers: tuple[Worker, Worker], collected: Collected) -> None:
    owner, reader = workers
    reader.connect(owner.offer("first", [0]))
    before_ns = time.time_ns()
    assert reader.pull(owner.offer("r1", [1]), [1]).wait(10)
    read = collected.one("kvlink.read")
    assert read.attributes["kvlink.inline"] is True
    assert before_ns <= read.began_ns
    assert collected.named("kvlink.connect") == []


@pytest.mark.verify
def test_a_pull_that_outlasts_its_call_begins_with_it(collected: Collected) -> None:
    with pair(fault="delay-data=30ms@every:1") as (owner, reader):
        reader.connect(owner.offer("first", [0]))
        before_ns = time.time_ns()
        pull = reader.pull(owner.offer("r1", [1]), [1])
        after_ns = time.time_ns()
        assert pull.wait(10)
    read = collected.one("kvlink.read")
    assert before_ns <= read.began_ns <= after_ns
    assert read.ended_ns - read.began_ns > 25_000_000


async def test_an_awaited_pull(workers: tuple[Worker, Worker], collected: Collected) -> None:
    owner, reader = workers
    await asyncio.wait_for(reader.pull(owner.offer("r1", [1], trace=REQUEST), [1]), 10)
    assert collected.one("kvlink.settle").trace == TRACE_ID


def test_a_settle_of_its_own(workers: tuple[Worker, Worker], collected: Collected) -> None:
    owner, reader = workers
    pull = reader.pull(owner.offer("r1", range(4)), range(4), settle=False)
    assert pull.wait(10)
    assert collected.named("kvlink.settle") == []
    assert pull.settle()
    assert collected.one("kvlink.settle").within(collected.one("kvlink.read"))


def test_without_a_request_an_offer_begins_the_trace(
    workers: tuple[Worker, Worker], collected: Collected
) -> None:
    owner, reader = workers
    assert reader.pull(owner.offer("r1", [1]), [1]).wait(10)
    offer = collected.one("kvlink.offer")
    assert offer.parent == ""
    assert collected.one("kvlink.read").within(offer)


def test_the_callers_span_is_the_parent(workers: tuple[Worker, Worker], collected: Collected) -> None:
    """It is the parent of an offer without a request of its own, and of a read whose owner is not traced."""
    owner, reader = workers
    with collected.provider.get_tracer("server").start_as_current_span("serving"):
        ticket = owner.offer("r1", [1])
        pull = reader.pull(replace(ticket, trace=None), [1])
    assert pull.wait(10)
    serving = collected.one("serving")
    assert collected.one("kvlink.offer").within(serving)
    assert collected.one("kvlink.read").within(serving)


@pytest.mark.parametrize("malformed", ["garbage", "00-0-0-00", f"ff{REQUEST[2:]}", "x" * 100_000, "\0\n"])
def test_a_malformed_traceparent_is_ignored(
    workers: tuple[Worker, Worker], collected: Collected, malformed: str
) -> None:
    owner, reader = workers
    assert reader.pull(owner.offer("r1", [1], trace=malformed), [1]).wait(10)
    assert collected.one("kvlink.offer").parent == ""


def test_a_request_that_is_not_recorded_has_no_spans(
    workers: tuple[Worker, Worker], collected: Collected
) -> None:
    owner, reader = workers
    ticket = owner.offer("r1", [1], trace=f"{REQUEST[:-2]}00")
    assert ticket.trace is not None
    assert (f"{ticket.trace.trace_id:032x}", ticket.trace.flags) == (TRACE_ID, 0)
    assert reader.pull(ticket, [1]).wait(10)
    assert collected.named("kvlink.offer") + collected.named("kvlink.read") == []


def test_a_failed_pull_is_an_error(workers: tuple[Worker, Worker], collected: Collected) -> None:
    owner, reader = workers
    ticket = owner.offer("r1", [1], trace=REQUEST)
    owner.abort("r1")
    with pytest.raises(StaleBlocks) as raised:
        reader.pull(ticket, [1]).wait(10)
    read = collected.one("kvlink.read")
    assert read.failed == str(raised.value)
    assert read.trace == TRACE_ID
    assert collected.named("kvlink.settle") == []


def test_a_cancelled_pull_is_an_error(collected: Collected) -> None:
    with pair(fault="hang-data@1") as (owner, reader):
        reader.connect(owner.offer("first", [0]))
        pull = reader.pull(owner.offer("r1", range(8)), range(8))
        assert not pull.wait(0)
        assert collected.named("kvlink.read") == [], "it has not ended"
        pull.cancel()
        assert "cancelled" in collected.one("kvlink.read").failed
        with pytest.raises(Cancelled):
            pull.wait(10)
        assert len(collected.named("kvlink.read")) == 1


def test_an_owner_that_is_gone_is_an_error_of_the_connect(
    workers: tuple[Worker, Worker], collected: Collected
) -> None:
    owner, reader = workers
    ticket = owner.offer("r1", [1], trace=REQUEST)
    owner.close()
    with pytest.raises(PeerUnreachable):
        reader.pull(ticket, [1], timeout_s=5).wait(20)
    connect = collected.one("kvlink.connect")
    assert "prefill" in connect.failed
    assert connect.within(collected.one("kvlink.offer"))


def test_a_refused_offer_is_an_error(workers: tuple[Worker, Worker], collected: Collected) -> None:
    with pytest.raises(ConfigError):
        workers[0].offer("r1", [10_000])
    assert "block ids" in collected.one("kvlink.offer").failed


def test_what_nobody_collects_is_passed_on() -> None:
    """A prefill server without spans does not cut decode off from the request."""
    with pair() as (owner, _):
        assert owner.offer("r1", [1], trace=REQUEST).trace == TraceParent.parse(REQUEST)
        assert owner.offer("r2", [2], trace="garbage").trace is None
        assert owner.offer("r3", [3]).trace is None
