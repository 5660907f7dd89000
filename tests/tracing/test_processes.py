# SPDX-License-Identifier: Apache-2.0
"""A request's way through a router, two servers and a coordinator, each a process of its own, is one trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")

from aiohttp import ClientSession
from tracing.collector import Collector, collecting
from tracing.finding import REQUEST, SPAN_ID, TRACE_ID

_SERVER = Path(__file__).with_name("server.py")
_KVLINK = [sys.executable, "-m", "kvlink"]


@contextmanager
def process(name: str, collector: Collector, *command: str) -> Iterator[str]:
    """Yields where it listens, the last word of what it says first. Ends it as an operator would."""
    env = os.environ | {
        "PYTHONPATH": str(_SERVER.parents[1]),
        "OTEL_SERVICE_NAME": name,
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector.address}",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        try:
            yield running.stdout.readline().split()[-1]
        finally:
            running.stdin.close()
            if "kvlink" in command:
                running.terminate()
            running.wait(30)


@contextmanager
def deployment(collector: Collector) -> Iterator[str]:
    """Yields the router's URL."""
    with ExitStack() as stack:

        def start(name: str, *command: str) -> str:
            return stack.enter_context(process(name, collector, *command))

        coordinator = start("coordinator", *_KVLINK, "coordinator", "--port", "0")
        prefill, decode = (
            start(role, sys.executable, str(_SERVER), role, coordinator) for role in ("prefill", "decode")
        )
        yield start("router", *_KVLINK, "router", "--prefill", prefill, "--decode", decode, "--port", "0")


async def test_one_trace_through_all_of_them() -> None:
    with collecting() as collector, deployment(collector) as url:
        headers = {"traceparent": REQUEST, "X-Request-Id": "r1"}
        async with (
            ClientSession() as client,
            client.post(f"{url}/v1/completions", json={"prompt": [1]}, headers=headers) as answer,
        ):
            num_bytes = (await answer.json())["bytes"]
        router, offer, offered, claim, claimed, connect, read, settle = collector.wait_for(
            "POST /v1/completions",
            "kvlink.offer",
            "kvlink.v1.Coordinator/Offer",
            "kvlink.claim",
            "kvlink.v1.Coordinator/Claim",
            "kvlink.connect",
            "kvlink.read",
            "kvlink.settle",
        )
    assert (router.trace, router.parent) == (TRACE_ID, SPAN_ID)
    assert offer.within(router)
    assert offered.within(offer)
    assert claim.within(offer)
    assert claimed.within(offer)
    assert connect.within(claim)
    assert read.within(claim)
    assert settle.within(read)
    assert claim.ended_ns <= connect.began_ns <= connect.ended_ns <= read.began_ns <= read.ended_ns
    assert (offered.kind, claimed.kind) == ("SERVER", "SERVER")
    for span in (router, offer, offered, claim, claimed, connect, read, settle):
        assert span.attributes["kvlink.request_id"] == "r1"
        assert span.failed == ""
    assert read.attributes["kvlink.bytes"] == num_bytes > 0
    assert read.attributes["kvlink.transport"] == "tcp"
    assert collector.services == {"router", "prefill", "decode", "coordinator"}
