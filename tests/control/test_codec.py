# SPDX-License-Identifier: Apache-2.0
"""Every message survives the way there and back; nothing foreign gets past the decoder but values within bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from control.cards import make_card, make_offer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.control.codec import CARD, AgentCalls, Codec, CoordinatorCalls, Method
from kvlink.control.limits import (
    MAX_BATCH_OPS,
    MAX_CONNECTION_ID,
    MAX_HELLOS,
    MAX_LEASE_KEYS,
    MAX_NAME_BYTES,
    MAX_OPAQUE_BYTES,
)
from kvlink.control.overview import (
    MAX_LINKS,
    Beat,
    CallCount,
    FailureCount,
    LinkReport,
    Overview,
    RefusalCount,
    WorkerReport,
    WorkerView,
)
from kvlink.control.values import (
    Claim,
    ConnectReply,
    ConnectRequest,
    CoordinatorStatus,
    HandoffBatch,
    HandoffKind,
    HandoffResults,
    JoinRequest,
    Membership,
    Nothing,
    Offer,
    Push,
    PushKind,
    RefusedHandoff,
    Renewal,
    SettleOrder,
    Watch,
    WorkerEpoch,
)
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, Order, Plane, dense
from kvlink.types import HostIdentity, Joined, TransportCard, WorkerCard, WorkerChange

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
NAMES = st.text(PRINTABLE, min_size=1, max_size=MAX_NAME_BYTES // 4)
BLOBS = st.binary(max_size=80)
SECONDS = st.floats(0.001, 3600.0)

WORKERS = st.builds(WorkerEpoch, NAMES, U64)
SETTLES = st.builds(SettleOrder, NAMES, U64, U32, U64)
SHORT = st.sampled_from(
    ["w", "prefill-0", "é<b>"]
)  # the overview is large: drawing names at length takes seconds
LINKS = st.lists(
    st.builds(LinkReport, SHORT, SHORT, st.booleans(), U32, *[U64] * 4, SECONDS, SECONDS), max_size=2
)
FAILURES = st.lists(st.builds(FailureCount, SHORT, U64), max_size=2)
REPORTS = st.builds(
    WorkerReport, U32, SECONDS, *[U32] * 3, *[U64] * 5, U32, LINKS.map(tuple), FAILURES.map(tuple), U64, U64
)
BEATS = st.builds(Beat, NAMES, U64, st.none() | REPORTS)
TRANSPORTS = st.lists(SHORT, max_size=2).map(tuple)
VIEWS = st.builds(
    WorkerView, SHORT, U64, SHORT, U64, TRANSPORTS, REPORTS, SECONDS, st.none(), SECONDS, st.just("") | SHORT
)
OVERVIEWS = st.builds(
    Overview,
    st.lists(VIEWS, max_size=1).map(tuple),
    st.tuples(st.builds(CallCount, SHORT, U64, SECONDS, SECONDS)),
    st.tuples(st.builds(RefusalCount, SHORT, SHORT, U64)),
    U32,
)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    of = draw(st.integers(1, 1024))
    rank = draw(st.integers(0, of - 1))
    ticket = draw(st.binary(min_size=1, max_size=200))
    return Offer(
        draw(NAMES), draw(NAMES), draw(U64), draw(SECONDS), rank, of, draw(st.integers(1, 255)), ticket
    )


@st.composite
def claims(draw: st.DrawFn) -> Claim:
    readers = draw(st.integers(1, 1024))
    return Claim(draw(NAMES), draw(st.floats(0, 3600)), draw(st.integers(0, readers - 1)), readers)


LEASE_KEYS = st.lists(BLOBS, max_size=MAX_LEASE_KEYS).map(tuple)


@st.composite
def cards(draw: st.DrawFn) -> WorkerCard:
    layout = dense(
        Geometry(
            num_layers=draw(st.integers(1, 5)),
            total_heads=draw(st.sampled_from([1, 2, 8])),
            row_bytes=draw(st.integers(1, 512)),
            num_blocks=draw(st.integers(1, 1000)),
            dtype=draw(NAMES),
            model=draw(st.text(PRINTABLE, max_size=20)),
        ),
        draw(st.sampled_from(Order)),
    )
    keys = st.lists(BLOBS, max_size=3).map(tuple)
    transports = st.builds(TransportCard, NAMES, BLOBS, keys, LEASE_KEYS, NAMES, st.booleans())
    return WorkerCard(
        worker_id=draw(NAMES),
        epoch=draw(U64),
        incarnation=draw(st.binary(min_size=16, max_size=16)),
        agent=draw(NAMES),
        host=draw(st.builds(HostIdentity, NAMES, U64, U64, U32, U32)),
        layout=layout,
        region_bytes=tuple(draw(st.lists(U64, max_size=4))),
        transports=tuple(draw(st.lists(transports, max_size=4))),
    )


REFUSED = st.builds(RefusedHandoff, st.sampled_from(HandoffKind), U64, st.just("EXPIRED"), NAMES)
CHANGES = st.builds(WorkerChange, st.sampled_from(Joined), cards())
EXAMPLES: list[tuple[Codec[Any], st.SearchStrategy[Any]]] = [
    (CARD, cards()),
    (CoordinatorCalls.JOIN.request, st.builds(JoinRequest, cards(), st.booleans())),
    (CoordinatorCalls.JOIN.reply, st.builds(Membership, U64, SECONDS, SECONDS)),
    (CoordinatorCalls.KEEP_ALIVE.request, BEATS),
    (CoordinatorCalls.KEEP_ALIVE.reply, st.builds(Push, st.sampled_from(PushKind), U32, U64)),
    (CoordinatorCalls.LEAVE.request, WORKERS),
    (CoordinatorCalls.GET_WORKER.request, WORKERS),
    (CoordinatorCalls.LIST_WORKERS.reply, st.lists(cards(), max_size=3)),
    (CoordinatorCalls.WATCH_WORKERS.request, st.builds(Watch, st.frozensets(NAMES, max_size=4))),
    (CoordinatorCalls.WATCH_WORKERS.reply, st.lists(CHANGES, max_size=3)),
    (CoordinatorCalls.OFFER.request, offers()),
    (CoordinatorCalls.OFFER.reply, st.just(Nothing())),
    (CoordinatorCalls.CLAIM.request, claims()),
    (CoordinatorCalls.CLAIM.reply, st.lists(BLOBS, max_size=8)),
    (CoordinatorCalls.SETTLE.request, SETTLES),
    (
        CoordinatorCalls.HANDOFFS.request,
        st.builds(
            HandoffBatch,
            *(st.lists(of, max_size=4) for of in (offers(), SETTLES, claims())),
            st.lists(U64, max_size=4).map(tuple),
        ),
    ),
    (
        CoordinatorCalls.HANDOFFS.reply,
        st.builds(
            HandoffResults,
            U64,
            U64,
            st.lists(st.tuples(U64, st.lists(BLOBS, max_size=3)), max_size=4),
            st.lists(REFUSED, max_size=4),
        ),
    ),
    (CoordinatorCalls.OVERVIEW.reply, OVERVIEWS),
    (CoordinatorCalls.STATUS.reply, st.builds(CoordinatorStatus, SECONDS, *[U32] * 3, *[U64] * 6)),
    (
        AgentCalls.CONNECT.request,
        st.builds(
            ConnectRequest,
            NAMES,
            U64,
            NAMES,
            st.lists(BLOBS, min_size=1, max_size=MAX_HELLOS).map(tuple),
            st.booleans(),
        ),
    ),
    (
        AgentCalls.CONNECT.reply,
        st.builds(
            ConnectReply,
            st.integers(0, MAX_CONNECTION_ID),
            st.lists(BLOBS, min_size=1, max_size=8).map(tuple),
            st.tuples(BLOBS, BLOBS),
            LEASE_KEYS,
        ),
    ),
    (AgentCalls.SETTLE_SEAT.request, SETTLES),
    (AgentCalls.SETTLE_SEAT.reply, st.booleans()),
    (
        AgentCalls.RENEW_SEATS.request,
        st.builds(Renewal, NAMES, U64, st.lists(st.tuples(U32, U64), max_size=8)),
    ),
    (AgentCalls.RENEW_SEATS.reply, st.lists(U32, max_size=8)),
]
METHODS = [
    method
    for calls in (CoordinatorCalls, AgentCalls)
    for method in vars(calls).values()
    if isinstance(method, Method)
]


@pytest.mark.parametrize(("codec", "values"), EXAMPLES)
@settings(max_examples=25)
@given(data=st.data())
def test_every_value_comes_back_equal(
    codec: Codec[Any], values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    assert codec.decode(codec.encode(value)) == value


def decoded(codec: Codec[Any], blob: bytes) -> Any:
    """None if refused; anything but ConfigError escapes."""
    try:
        return codec.decode(blob)
    except ConfigError:
        return None


def _mutate(data: st.DataObject, blob: bytes) -> bytes:
    if data.draw(st.booleans(), "truncate"):
        return blob[: data.draw(st.integers(0, max(0, len(blob) - 1)))]
    damaged = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 4))):
        if damaged:
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] ^= data.draw(st.integers(1, 255))
    return bytes(damaged)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_within_bounds(data: st.DataObject) -> None:
    codec, values = data.draw(st.sampled_from(EXAMPLES))
    damaged = _mutate(data, codec.encode(data.draw(values)))
    value = decoded(codec, damaged)
    assert value is None or codec.decode(codec.encode(value)) == value


@given(st.data())
def test_a_damaged_card_is_refused(data: st.DataObject) -> None:
    card = data.draw(cards())
    damaged = _mutate(data, CARD.encode(card))
    assert decoded(CARD, damaged) in (None, card)  # equal: for instance a longer form of the same number


@given(blob=st.binary(max_size=300), method=st.sampled_from(METHODS))
def test_noise_raises_nothing_but_config_error(blob: bytes, method: Method[Any, Any]) -> None:
    decoded(method.request, blob)
    decoded(method.reply, blob)


OFFER, CLAIM = make_offer("r"), Claim("r", 1.0)
REPORT, LINK = WorkerReport(), LinkReport("w", "tcp")


@pytest.mark.parametrize(
    ("codec", "value", "names"),
    [
        (CoordinatorCalls.OFFER.request, OFFER._replace(request_id=""), "request_id"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(request_id="é" * 257), "request_id has 514 bytes"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ttl_s=float("nan")), "ttl_s"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ttl_s=0.0), "ttl_s"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(tp_rank=1), "rank 1 of 1"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(num_seats=0), "num_seats"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(ticket=b""), "ticket"),
        (CoordinatorCalls.OFFER.request, OFFER._replace(epoch=-1), "Offer"),
        (CoordinatorCalls.CLAIM.request, CLAIM._replace(timeout_s=float("inf")), "timeout_s"),
        (CoordinatorCalls.CLAIM.request, CLAIM._replace(reader=1), "reader 1 of 1"),
        (CoordinatorCalls.LEAVE.request, WorkerEpoch("w" * (MAX_NAME_BYTES + 1), 1), "worker_id"),
        (
            CoordinatorCalls.KEEP_ALIVE.request,
            Beat("w", 1, REPORT._replace(links=(LINK,) * (MAX_LINKS + 1))),
            "number of links is 33",
        ),
        (CoordinatorCalls.KEEP_ALIVE.request, Beat("w", 1, REPORT._replace(oldest_lease_s=-1.0)), "oldest"),
        (
            CoordinatorCalls.KEEP_ALIVE.request,
            Beat("w", 1, REPORT._replace(failures=(FailureCount("é" * 33, 1),))),
            "bytes of a reason",
        ),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", []), "hellos"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", [b""] * (MAX_HELLOS + 1)), "hellos"),
        (AgentCalls.CONNECT.request, ConnectRequest("w", 1, "tcp", [bytes(MAX_OPAQUE_BYTES + 1)]), "a hello"),
    ],
)
def test_what_exceeds_a_bound_is_not_sent(codec: Codec[Any], value: Any, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        codec.encode(value)


def test_a_batch_of_too_many_operations_is_not_taken() -> None:
    batch = HandoffBatch([], [], [CLAIM] * (MAX_BATCH_OPS + 1))
    blob = CoordinatorCalls.HANDOFFS.request.encode(batch)
    with pytest.raises(ConfigError, match=r"operations in a batch is (over 1024|1025)"):
        CoordinatorCalls.HANDOFFS.request.decode(blob)


def test_a_card_of_another_protocol_version_says_what_to_do() -> None:
    blob = CARD.encode(dataclasses.replace(make_card(), protocol_version=9))
    with pytest.raises(
        ConfigError,
        match=r"worker 'prefill' speaks protocol version 9 and this process speaks 2; run releases",
    ):
        CARD.decode(blob)


def test_a_card_with_an_impossible_layout_is_refused() -> None:
    card = make_card()
    layout = dataclasses.replace(card.layout)
    object.__setattr__(layout, "planes", (Plane(0, 0, 2**63),))
    with pytest.raises(ConfigError, match=r"malformed SealedCard: layout: planes\[0\]"):
        CARD.decode(CARD.encode(dataclasses.replace(card, layout=layout)))
