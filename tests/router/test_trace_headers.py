# SPDX-License-Identifier: Apache-2.0
"""The router's span is the parent of both servers' work; without spans it passes on the one it was given."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp", reason="pip install 'kvlink[router]'")
pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvlink[otel]'")

from contextlib import AsyncExitStack

from test_router import BODY, Place
from tracing.finding import REQUEST, SPAN_ID, TRACE_ID
from tracing.memory import collecting_here

from kvlink.tracing import TraceParent

NOTES = {"tracestate": "vendor=1"}


async def asked(**headers: str) -> list[tuple[str, str, str]]:
    """Returns what each side got: traceparent as a header and in the handoff, and tracestate."""
    async with AsyncExitStack() as stack:
        place = await Place(stack).start()
        assert (await place.post(**headers))[0] == 200
        sides = place.prefill[0], place.decode[0]
        return [
            (
                side.headers[0].get("traceparent", ""),
                side.asked[0]["kv_transfer_params"].get("kvlink_traceparent", ""),
                side.headers[0].get("tracestate", ""),
            )
            for side in sides
        ]


async def test_a_request_with_a_trace() -> None:
    with collecting_here() as collected:
        prefill, decode = await asked(traceparent=REQUEST, **NOTES, **{"X-Request-Id": "r1"})
        span = collected.one("POST /v1/completions")
    assert (span.trace, span.parent, span.kind, span.failed) == (TRACE_ID, SPAN_ID, "SERVER", "")
    assert span.attributes == {"kvlink.request_id": "r1", "http.response.status_code": 200}
    ours = f"00-{span.trace}-{span.id}-01"
    assert prefill == (ours, ours, "vendor=1")
    assert decode == (ours, "", "vendor=1"), "the handoff is prefill's, as it is"


@pytest.mark.parametrize("given", [{}, {"traceparent": "garbage"} | NOTES])
async def test_a_trace_begins_here(given: dict[str, str]) -> None:
    with collecting_here() as collected:
        prefill, decode = await asked(**given)
        span = collected.one("POST /v1/completions")
    assert span.parent == ""
    handed_on = TraceParent.parse(prefill[0])
    assert handed_on is not None
    assert handed_on[:2] == (int(span.trace, 16), int(span.id, 16))
    assert decode[0] == prefill[0]
    assert (prefill[2], decode[2]) == ("", "")


async def test_a_request_that_nobody_serves_is_an_error() -> None:
    with collecting_here() as collected:
        async with AsyncExitStack() as stack:
            place = await Place(stack).start()
            for engine in place.decode:
                await place.kill(engine)
            assert (await place.post(BODY, traceparent=REQUEST))[0] == 503
        span = collected.one("POST /v1/completions")
    assert span.failed == "answered 503"
    assert span.attributes["http.response.status_code"] == 503


async def test_without_spans_what_was_given_is_passed_on() -> None:
    assert await asked(traceparent=REQUEST, **NOTES) == [
        (REQUEST, REQUEST, "vendor=1"),
        (REQUEST, "", "vendor=1"),
    ]
    assert await asked() == [("", "", ""), ("", "", "")]
