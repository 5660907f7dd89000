# SPDX-License-Identifier: Apache-2.0
"""OTEL_* variables decide where spans go; by default nowhere, and nothing is imported for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tracing.collector import collecting

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
