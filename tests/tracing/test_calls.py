# SPDX-License-Identifier: Apache-2.0
"""Spans of calls, and how tracing starts."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator

import grpc.aio
import pytest
from control.cards import make_card, make_offer
from control.raw import raw_channel
from tracing.collector import collecting
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


_HANDOFF = """
import sys
from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.layout import Geometry, dense

def pool():
    shape = Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=4, block_tokens=16)
    return BlockPool.allocate(dense(shape), huge_pages=False)

config = WorkerConfig(transports="loopback")
with Worker(pool(), "prefill", config=config) as owner, Worker(pool(), "decode", config=config) as reader:
    assert reader.pull(owner.offer("r1", [1]), [1]).wait(10)
"""
_SAY_WHAT_IS_LOADED = """
print([name for name in sys.modules if name.split(".")[0] == "opentelemetry"])
"""
_BLOCKED = """
import sys
sys.modules["opentelemetry"] = None
"""


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process that has no other OTEL_* variables."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


OFF = {
    "nothing said": {},
    "no exporter": {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
    "disabled": {"OTEL_SDK_DISABLED": "true", "OTEL_TRACES_EXPORTER": "console"},
    "only another signal": {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"},
}


@pytest.mark.parametrize("variables", OFF.values(), ids=OFF.keys())
def test_without_an_exporter_nothing_is_imported(variables: dict[str, str]) -> None:
    assert run(_HANDOFF + _SAY_WHAT_IS_LOADED, **variables).stdout == "[]\n"


def test_without_the_extra_it_says_so_and_goes_on() -> None:
    done = run(_BLOCKED + _HANDOFF, OTEL_TRACES_EXPORTER="otlp")
    assert "pip install 'kvlink[otel]'" in done.stderr


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"OTEL_TRACES_EXPORTER": "otpl"}, "exports otpl"),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "otlp_proto_http"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://[", "OTEL_TRACES_EXPORTER": "console,otlp"}, "no traces"),
    ],
)
def test_what_cannot_be_had_is_said_and_harmless(variables: dict[str, str], problem: str) -> None:
    assert problem in run(_HANDOFF, **variables).stderr


def test_the_console() -> None:
    assert '"name": "kvlink.read"' in run(_HANDOFF, OTEL_TRACES_EXPORTER="console").stdout


@pytest.mark.parametrize("variable", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_an_address_suffices(variable: str) -> None:
    with collecting() as collector:
        run(_HANDOFF, OTEL_SERVICE_NAME="both", **{variable: f"http://{collector.address}"})
        offer, read = collector.wait_for("kvlink.offer", "kvlink.read")
    assert read.within(offer)
    assert collector.services == {"both"}


def test_the_samplers_are_opentelemetrys() -> None:
    done = run(_HANDOFF, OTEL_TRACES_EXPORTER="console", OTEL_TRACES_SAMPLER="always_off")
    assert done.stdout == ""


def test_a_provider_of_the_process_is_used() -> None:
    """An inference server may have set OpenTelemetry up before: its resource and its processors are used."""
    set_up = """
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider(resource=Resource({"service.name": "server"}))
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)
"""
    output = run(set_up + _HANDOFF, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1").stdout
    assert output.count('"service.name": "server"') == output.count('"name": "kvlink.') > 2


def test_the_process_keeps_its_default() -> None:
    later = """
from opentelemetry import trace
print(type(trace.get_tracer_provider()).__name__)
"""
    output = run(_HANDOFF + later, OTEL_TRACES_EXPORTER="console").stdout
    assert "ProxyTracerProvider" in output.splitlines()
