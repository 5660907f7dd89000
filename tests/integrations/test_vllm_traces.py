# SPDX-License-Identifier: Apache-2.0
"""Between two vLLM servers: the scheduler's handoff carries the trace of the request to decode's workers."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch (pip install torch)")
pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvlink[otel]'")

from tracing.finding import REQUEST, SPAN_ID, TRACE_ID
from tracing.memory import collecting_here
from vllm_server import ASK_PREFILL, Server, request

from kvlink.coordinator import Coordinator
from kvlink.integrations.vllm.wire.handoff import Handoff
from kvlink.integrations.vllm.wire.handoff_parts import STREAM
from kvlink.integrations.vllm.wire.traces import TRACEPARENT
from kvlink.tracing import TraceParent

PROMPT = list(range(100, 110))
OFFER, CLAIM = "kvlink.v1.Coordinator/Offer", "kvlink.v1.Coordinator/Claim"


@pytest.mark.parametrize("header", [False, True], ids=["in the handoff", "as a header"])
def test_one_trace(header: bool) -> None:
    with collecting_here() as collected, Server("p", tp_size=2) as prefill, Server("d") as decode:
        asked = request("r", PROMPT, ASK_PREFILL if header else ASK_PREFILL | {TRACEPARENT: REQUEST})
        asked.trace_headers = {"traceparent": REQUEST} if header else None
        _, params = prefill.prefill(asked, [3, 9, 1])
        decode.loads(request("x", PROMPT, params), [5, 6, 7])
        prefill.step_until(lambda: "r" in prefill.sent)
        assert not prefill.scheduler._traces._offers
        offer = collected.one("kvlink.offer")
        reads, settles = collected.named("kvlink.read"), collected.named("kvlink.settle")
    assert (offer.trace, offer.parent) == (TRACE_ID, SPAN_ID)
    assert offer.attributes == {"kvlink.request_id": "r", "kvlink.peer": "p-0"}
    assert {read.attributes["kvlink.peer"] for read in reads} == {"p-0", "p-1"}
    assert all(read.within(offer) for read in reads)
    assert {settle.parent for settle in settles} == {read.id for read in reads}


@pytest.mark.parametrize("given", ["garbage", 7, None, ["00"]])
def test_what_is_no_trace_is_ignored(given: object) -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL | {TRACEPARENT: given}), [3, 9, 1])
        assert Handoff.from_params(params).trace is None


def test_what_nobody_collects_is_passed_on() -> None:
    with Server("p") as prefill:
        params = prefill.hands_off(request("r", PROMPT, ASK_PREFILL | {TRACEPARENT: REQUEST}), [3, 9, 1])
        assert Handoff.from_params(params).trace == TraceParent.parse(REQUEST)
        assert params[TRACEPARENT] == REQUEST


def test_parts_that_are_announced_are_in_the_trace(coordinator: Coordinator) -> None:
    """Both ends of each: the first claim waits before anybody knows of an offer."""
    with (
        collecting_here() as collected,
        Server("p", coordinator=coordinator.address) as prefill,
        Server("d", coordinator=coordinator.address) as decode,
    ):
        named = {STREAM: "s", TRACEPARENT: REQUEST}
        asks = request("r", PROMPT, ASK_PREFILL | named)
        waits = request("x", PROMPT, {"do_remote_prefill": True} | named)
        decode.scheduler.incoming.arrived(waits)
        prefill.begin(asks, [3, 9])
        prefill.compute(asks, 6)
        decode.load_when_announced(waits, [5, 6, 7])
        prefill.compute(asks, 4, [1])
        decode.step_until(lambda: "x" in decode.received)
        assert not decode.failed
        decode.step_until(lambda: len(collected.named(CLAIM)) == 2)
        offer = collected.one("kvlink.offer")
        offers, claims = collected.named(OFFER), collected.named(CLAIM)
    assert [each.attributes["kvlink.request_id"] for each in offers] == ["s/0", "s/1"]
    assert [each.within(offer) for each in offers] == [True, True]
    assert [each.attributes["kvlink.request_id"] for each in claims] == ["s/0", "s/1"]
    assert [(each.trace, each.parent) for each in claims] == [(TRACE_ID, SPAN_ID), (TRACE_ID, offer.id)]
