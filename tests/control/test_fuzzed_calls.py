# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes a method is called with, it ends soon, keeps no memory, and honest calls still work."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import grpc
import pytest
from control.cards import make_offer
from control.codec_values import EXAMPLES, METHODS
from control.test_instructions_of_calls import MOST, State
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.codec import Method
from kvlink.control.values import Claim

MOST_KEPT_BYTES = 4 << 20
VALUES = {id(codec): values for codec, values in EXAMPLES}
SURROGATE = b"\xed\xa0\x80"
CHUNKS = st.sampled_from([SURROGATE, b"\xff" * 9, b"\0", b"\x80" * 10, b"\x0a\x03" + SURROGATE])


@st.composite
def blobs(draw: st.DrawFn, method: Method[Any, Any]) -> bytes:
    """A valid message, most of the time with bytes cut out, changed or put in."""
    values = VALUES.get(id(method.request))
    blob = bytearray(method.request.encode(draw(values)) if values is not None else b"")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(blob)))
        blob[at : at + draw(st.integers(0, 4))] = draw(CHUNKS | st.binary(max_size=4))
    return bytes(blob * draw(st.sampled_from([1, 1, 1, 200])))


async def call(method: Method[Any, Any], messages: list[bytes]) -> None:
    state = State()
    await state.store.start()
    try:
        await state.serve(method, messages)
        assert state.steps.most <= MOST
        await state.store.join(state.card, False)
        await state.call(Calls.OFFER, make_offer("honest"))
        answer = await state.call(Calls.CLAIM, Claim("honest", 0.0))
        assert answer.code is grpc.StatusCode.OK
        assert Calls.CLAIM.reply.decode(answer.replies[0]) == [make_offer("honest").ticket]
    finally:
        await state.close()


@pytest.mark.filterwarnings("ignore:Generating overly large repr")
@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
def test_any_bytes(method: Method[Any, Any]) -> None:
    @settings(max_examples=20, deadline=None)
    @given(st.lists(blobs(method), min_size=1, max_size=2))
    def run(messages: list[bytes]) -> None:
        asyncio.run(call(method, messages))

    run()
    tracemalloc.start()
    run()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < MOST_KEPT_BYTES
