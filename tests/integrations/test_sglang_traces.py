# SPDX-License-Identifier: Apache-2.0
"""SGLang does not say which trace a request has: its chunks share one of their own."""

from __future__ import annotations

import pytest
from waiting import eventually

pytest.importorskip("opentelemetry.sdk", reason="pip install 'kvlink[otel]'")

from contextlib import closing

from test_sglang_handoff import ROOM, Server, delivered, send
from tracing.memory import collecting_here


def test_a_room_is_one_trace() -> None:
    with (
        collecting_here() as collected,
        closing(Server("prefill", has_states=False)) as prefill,
        closing(Server("decode", has_states=False)) as decode,
    ):
        want = decode.expect([1, 2], [])
        chunks = send(prefill, [want], [10], last=False) + send(prefill, [want], [11], first=1)
        for chunk in chunks:
            decode.incoming.arrived(chunk)
        eventually(lambda: decode.incoming.poll(ROOM))
        eventually(lambda: delivered(prefill))
        first, second = collected.named("kvlink.offer")
        reads = collected.named("kvlink.read")
    assert first.parent == ""
    assert second.within(first)
    assert sorted(read.parent for read in reads) == sorted([first.id, second.id])
    assert {read.trace for read in reads} == {first.trace}
