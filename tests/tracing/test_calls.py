# SPDX-License-Identifier: Apache-2.0
"""Calls between processes belong to the trace of their caller, and servers tell of those that do."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from control.cards import make_card, make_offer
from control.raw import raw_channel
from tracing.finding import REQUEST, SPAN_ID, TRACE_ID
from tracing.memory import Collected
from transports.pools import PoolSpec
from waiting import eventually

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.control import CoordinatorClient
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.values import Claim
from kvlink.coordinator import Coordinator
from kvlink.errors import UnknownRequest
from kvlink.ticket import LeaseSeat
from kvlink.tracing import TraceParent
from kvlink.transfer.pull_request import settle_args

CLAIM = "kvlink.v1.Coordinator/Claim"
OFFER = "kvlink.v1.Coordinator/Offer"


def make_ticket(request_id: str, trace: TraceParent | None) -> bytes:
    seats, blocks = (LeaseSeat(1, 1001, 1002),), array("I", [1])
    return Ticket(request_id, "prefill", 1, "127.0.0.1:1", seats, blocks, 16, 1, trace=trace).to_bytes()


@pytest.fixture
async def coordinator(collected: Collected) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    await coordinator.start()
    yield coordinator
    await coordinator.close()


async def test_a_refused_claim_is_an_error_below_its_caller(
    coordinator: Coordinator, collected: Collected
) -> None:
    async with CoordinatorClient(coordinator.address) as client:
        serving = collected.provider.get_tracer("server").start_as_current_span("serving")
        with serving, pytest.raises(UnknownRequest):
            await client.claim("r1", timeout_s=0)
    claim = collected.one(CLAIM)
    assert claim.within(collected.one("serving"))
    assert claim.attributes == {"rpc.system": "grpc", "kvlink.request_id": "r1"}
    assert "r1" in claim.failed


async def test_calls_of_no_trace_have_no_spans(coordinator: Coordinator, collected: Collected) -> None:
    async with CoordinatorClient(coordinator.address) as client:
        await client.status()
        with pytest.raises(UnknownRequest):
            await client.claim("r1", timeout_s=0)
    assert collected.named("kvlink.v1.Coordinator/Status") + collected.named(CLAIM) == []


async def test_each_hand_off_of_a_stream_is_in_its_own_trace(
    coordinator: Coordinator, collected: Collected
) -> None:
    traces = {"r1": REQUEST, "r2": REQUEST.replace(TRACE_ID, "ab" * 16), "r3": ""}
    tickets = {name: make_ticket(name, TraceParent.parse(trace)) for name, trace in traces.items()}
    async with CoordinatorClient(coordinator.address) as client:
        await client.join(make_card())
        async with client.handoffs() as stream:
            waits = [stream.claim(Claim(name, 10.0)) for name in traces]
            for name, ticket in tickets.items():
                await stream.offer(make_offer(name)._replace(ticket=ticket))
            assert [await each for each in waits] == [[ticket] for ticket in tickets.values()]
            with pytest.raises(UnknownRequest):
                await stream.offer(make_offer("r1", epoch=7)._replace(ticket=tickets["r1"]))
    for name in (OFFER, CLAIM):
        spans = [span for span in collected.named(name) if not span.failed]
        assert {span.attributes["kvlink.request_id"]: span.trace for span in spans} == {
            "r1": TRACE_ID,
            "r2": "ab" * 16,
        }
        assert all(span.parent == SPAN_ID and span.ended_ns >= span.began_ns for span in spans)
    (refused,) = [span for span in collected.named(OFFER) if span.failed]
    assert "epoch" in refused.failed


@pytest.mark.parametrize("header", [REQUEST, "garbage", "x" * 4000, ""])
async def test_a_malformed_traceparent_is_ignored(
    coordinator: Coordinator, collected: Collected, header: str
) -> None:
    method = CoordinatorCalls.CLAIM
    async with raw_channel(coordinator.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary(method.path)(
                method.request.encode(Claim("r1", 0.0)), metadata=(("traceparent", header),)
            )
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
    assert [span.trace for span in collected.named(CLAIM)] == ([TRACE_ID] if header == REQUEST else [])


async def test_a_settle_through_the_control_plane(collected: Collected) -> None:
    config = WorkerConfig(transports="loopback")
    with (
        Worker(PoolSpec().make(), "prefill", config=config) as owner,
        Worker(PoolSpec().make(), "decode", config=config) as reader,
    ):
        pull = reader.pull(owner.offer("r1", [1], trace=REQUEST), [1], settle=False)
        assert pull.wait(10)
        ticket, peer, _ = pull.parts()[0]
        reader._sources.releaser.settle_by_agent(peer.card, *settle_args(ticket, peer.assignment), ticket)
        settles = eventually(lambda: collected.named("kvlink.v1.WorkerAgent/SettleSeat"))
        assert [event.request_id for event in owner.events()] == ["r1"]
        assert owner.lease_counts().settled == 1
    assert [settle.within(collected.one("kvlink.offer")) for settle in settles] == [True]
