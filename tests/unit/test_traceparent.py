# SPDX-License-Identifier: Apache-2.0
"""Trace context: what the W3C allows is read, everything else is no trace and never an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.tracing import TraceParent
from kvlink.tracing.traceparent import NUM_BYTES

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TEXT = f"00-{TRACE_ID}-{SPAN_ID}-01"
traces = st.builds(TraceParent, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))


@given(traces)
def test_text_and_bytes_give_the_same_trace_back(trace: TraceParent) -> None:
    assert TraceParent.parse(str(trace)) == trace
    assert len(trace.to_bytes()) == NUM_BYTES
    assert TraceParent.from_bytes(trace.to_bytes()) == trace


def test_the_example_of_the_w3c() -> None:
    trace = TraceParent.parse(TEXT)
    assert trace == (int(TRACE_ID, 16), int(SPAN_ID, 16), 1)
    assert str(trace) == TEXT


@pytest.mark.parametrize(
    "text", [f" {TEXT}\t", f"01-{TRACE_ID}-{SPAN_ID}-01", f"cc{TEXT[2:]}-what.comes.later"]
)
def test_what_is_allowed(text: str) -> None:
    assert TraceParent.parse(text) == TraceParent.parse(TEXT)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        TEXT.upper(),
        TEXT[:-1],
        TEXT[1:],
        f"ff{TEXT[2:]}",
        f"{TEXT}-more",
        f"cc{TEXT[2:]}more",
        f"cc{TEXT[2:]}-{'x' * 500}",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        TEXT.replace("-", "_"),
        TEXT.replace("4", "\N{ARABIC-INDIC DIGIT FOUR}"),
    ],
)
def test_what_is_not(text: str) -> None:
    assert TraceParent.parse(text) is None


@given(st.text(max_size=80) | st.text("0123456789abcdef-", min_size=50, max_size=60))
def test_foreign_text_is_no_error(text: str) -> None:
    trace = TraceParent.parse(text)
    assert trace is None or trace.trace_id * trace.span_id > 0


@given(st.binary(max_size=2 * NUM_BYTES))
def test_foreign_bytes_are_no_error(blob: bytes) -> None:
    trace = TraceParent.from_bytes(blob)
    assert trace is None or trace.to_bytes() == blob
