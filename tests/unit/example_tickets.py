# SPDX-License-Identifier: Apache-2.0
"""Tickets of every kind for tests of their wire form."""

from __future__ import annotations

import dataclasses
from array import array

from hypothesis import strategies as st

from kvlink.ticket import MAX_SLOTS, SHARED_SEAT, SIGNATURE_BYTES, SMALLEST_NONCE, LeaseSeat, Ticket
from kvlink.ticket.prefix_digests import PrefixDigests
from kvlink.tracing import TraceParent
from kvlink.types import ReadyUnit

names = st.text(min_size=1, max_size=60)
words = st.integers(0, 2**64 - 1)
nonces = st.integers(SMALLEST_NONCE, 2**64 - 1)
seats = st.builds(LeaseSeat, st.integers(1, MAX_SLOTS), nonces, nonces)
traces = st.builds(TraceParent, st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
tickets = st.builds(
    Ticket,
    request_id=names,
    worker_id=names,
    epoch=words,
    agent=st.text(max_size=40),
    seats=st.lists(seats, min_size=1, max_size=8).map(tuple),
    block_ids=st.lists(st.integers(0, 2**32 - 1), max_size=64).map(lambda ids: array("I", ids)),
    num_tokens=st.integers(0, 2**32 - 1),
    ready=st.integers(0, 2**32 - 1),
    ready_unit=st.sampled_from(ReadyUnit),
    rank=st.integers(0, 65535),
    num_ranks=st.integers(0, 65535),
    ttl_s=st.integers(0, 2**32 - 1).map(lambda ms: ms / 1000),
    signature=st.just(b"") | st.binary(min_size=SIGNATURE_BYTES, max_size=SIGNATURE_BYTES).filter(any),
    trace=st.none() | traces,
    model=st.just(0) | st.integers(0, 2**64 - 1),
)

TRACE = TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
TICKET = Ticket(
    request_id="request-1",
    worker_id="prefill-0",
    epoch=5,
    agent="127.0.0.1:7401",
    seats=(LeaseSeat(3, 1011, 1012),),
    block_ids=array("I", range(40)),
    num_tokens=640,
    ready=40,
)

SOFT = dataclasses.replace(
    TICKET,
    seats=(LeaseSeat(3, 1011, SHARED_SEAT),),
    digests=PrefixDigests.of([bytes([number]) * 16 for number in range(40)]),
)
