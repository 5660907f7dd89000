# SPDX-License-Identifier: Apache-2.0
"""Strategies that draw every message of the control plane within its bounds, with its codec."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvlink.control.codec import CARD, AgentCalls, Codec, CoordinatorCalls, Method
from kvlink.control.limits import (
    MAX_CHANNEL_ADDRESSES,
    MAX_CONNECTION_ID,
    MAX_HELLOS,
    MAX_LEASE_KEYS,
    MAX_NAME_BYTES,
)
from kvlink.control.overview import (
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
    FoundPrefix,
    HandoffBatch,
    HandoffKind,
    HandoffResults,
    JoinRequest,
    Membership,
    Nothing,
    Offer,
    Prefix,
    PrefixChanges,
    PrefixQuery,
    Push,
    PushKind,
    RefusedHandoff,
    Renewal,
    SettleOrder,
    Watch,
    WorkerEpoch,
)
from kvlink.layout import Geometry, Order, dense
from kvlink.types import HostIdentity, Joined, NativeChannel, TransportCard, WorkerCard, WorkerChange

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
PRINTABLE = st.characters(exclude_categories=["C", "Z"], include_characters=" ")
NAMES = st.text(PRINTABLE, min_size=1, max_size=MAX_NAME_BYTES // 4)
BLOBS = st.binary(max_size=80)
SECONDS = st.floats(0.001, 3600.0)
CHANNELS = st.builds(
    NativeChannel,
    st.lists(NAMES, min_size=1, max_size=MAX_CHANNEL_ADDRESSES).map(tuple),
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=32, max_size=32),
    U32,
)
WORKERS = st.builds(WorkerEpoch, NAMES, U64)
SETTLES = st.builds(SettleOrder, NAMES, U64, U32, U64)
# The overview is large, and drawing names at length takes seconds.
SHORT = st.sampled_from(["w", "prefill-0", "é<b>"])
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
    WorkerView,
    SHORT,
    U64,
    SHORT,
    U64,
    TRANSPORTS,
    REPORTS,
    SECONDS,
    st.none(),
    SECONDS,
    st.just("") | SHORT,
    st.booleans(),
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


SCOPES = st.binary(min_size=16, max_size=16)
KEYS = st.lists(st.binary(min_size=8, max_size=8), min_size=1, max_size=9).map(b"".join)
STEPS = st.integers(1, 1 << 20)
SOME_NAMES = st.lists(NAMES, max_size=3).map(tuple)
QUERIES = st.builds(
    PrefixQuery, SCOPES, STEPS, KEYS, U32, st.integers(1, 16), st.just("") | NAMES, SOME_NAMES
)


@st.composite
def found_prefixes(draw: st.DrawFn) -> FoundPrefix:
    tickets = tuple(draw(st.lists(BLOBS, min_size=1, max_size=3)))
    names = st.lists(NAMES, min_size=len(tickets), max_size=len(tickets)).map(tuple)
    return FoundPrefix(draw(st.integers(1, 1 << 16)), tickets, draw(st.just(()) | names))


@st.composite
def prefixes(draw: st.DrawFn) -> Prefix:
    of = draw(st.integers(1, 1024))
    ticket = draw(st.binary(min_size=1, max_size=200))
    rank = draw(st.integers(0, of - 1))
    return Prefix(draw(NAMES), draw(SECONDS), rank, of, draw(SCOPES), draw(STEPS), draw(KEYS), ticket)


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
    channel = draw(st.none() | CHANNELS)
    return WorkerCard(
        worker_id=draw(NAMES),
        epoch=draw(U64),
        incarnation=draw(st.binary(min_size=16, max_size=16)),
        agent=draw(NAMES) if channel is None else draw(NAMES | st.just("")),
        host=draw(st.builds(HostIdentity, NAMES, U64, U64, U32, U32)),
        layouts=(layout,) * draw(st.integers(1, 3)),
        region_bytes=tuple(draw(st.lists(U64, max_size=4))),
        transports=tuple(draw(st.lists(transports, max_size=4))),
        draining=draw(st.booleans()),
        channel=channel,
    )


REFUSED = st.builds(RefusedHandoff, st.sampled_from(HandoffKind), U64, st.just("EXPIRED"), NAMES)
CHANGES = st.builds(WorkerChange, st.sampled_from(Joined), cards())
EXAMPLES: list[tuple[Codec[Any], st.SearchStrategy[Any]]] = [
    (CARD, cards()),
    (
        CoordinatorCalls.JOIN.request,
        st.builds(JoinRequest, cards().filter(lambda card: card.agent), st.booleans()),
    ),
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
    (
        CoordinatorCalls.PUBLISH_PREFIXES.request,
        st.builds(
            PrefixChanges,
            NAMES,
            U64,
            st.lists(prefixes(), max_size=3).map(tuple),
            st.lists(NAMES, max_size=3).map(tuple),
        ),
    ),
    (CoordinatorCalls.PUBLISH_PREFIXES.reply, U64),
    (CoordinatorCalls.FIND_PREFIX.request, QUERIES),
    (CoordinatorCalls.FIND_PREFIX.reply, st.lists(found_prefixes(), max_size=3)),
    (CoordinatorCalls.OVERVIEW.reply, OVERVIEWS),
    (
        CoordinatorCalls.STATUS.reply,
        st.builds(CoordinatorStatus, SECONDS, *[U32] * 3, *[U64] * 6, *[U32] * 2, *[U64] * 6),
    ),
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
    (AgentCalls.DRAIN.request, WORKERS),
    (AgentCalls.DRAIN.reply, U32),
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
