# SPDX-License-Identifier: Apache-2.0
"""No call holds the loop of a server for long, not even with the largest message in the largest state.

`MOST` is what docs/operate/sizing.md states.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from control.cards import make_card, make_layout, make_offer
from control.fake_etcd import FakeEtcd
from control.stepping import Steps, counted

from kvlink.control import Limits, WorkerAgent
from kvlink.control.codec import AgentCalls, Method, StoredRecords
from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.overview import MAX_LINKS, MAX_REASONS, Beat, FailureCount, LinkReport, WorkerReport
from kvlink.control.values import (
    Claim,
    ConnectRequest,
    HandoffBatch,
    JoinRequest,
    Nothing,
    Prefix,
    PrefixChanges,
    PrefixQuery,
    Renewal,
    SettleOrder,
    Watch,
    WorkerEpoch,
)
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.etcd.api import Etcd
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.mirror import Mirror, News
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.layout import Plane
from kvlink.types import TransportCard, WorkerCard
from kvlink.v1 import etcd_pb2 as pb

MOST = 500_000
MANY = 8_192
"""More than one turn may end. What ends together is divided, so more of it takes more turns."""
_TURNS = 500
OWNER, OTHER = WorkerEpoch("prefill", 1), WorkerEpoch("decode", 1)


class Context:
    """Serves as a grpc.aio.ServicerContext, with messages that the client sends and those that it gets."""

    def __init__(self, *blobs: bytes) -> None:
        self._blobs = list(blobs)
        self.code = grpc.StatusCode.OK
        self.details = ""
        self.replies: list[bytes] = []
        self.may_wait = False

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def peer_identities(self) -> None:
        return None

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailers: object) -> None:
        pass

    async def read(self) -> Any:
        return self._blobs.pop(0) if self._blobs else grpc.aio.EOF

    async def write(self, blob: bytes) -> None:
        self.replies.append(blob)


class State:
    """A coordinator and an agent without a network, at their limits where a test brings them there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.card = make_card()
        self.steps = Steps()
        self.waiting: list[asyncio.Future[Any]] = []
        self.limits = Limits()
        self.store = MemoryStore(10.0, self.limits, lambda: self.now)
        self.coordinator = Coordinator(self.store, limits=self.limits)
        self.agent = WorkerAgent(
            lambda transport, hellos, takes_keys, caller: (1, list(hellos)),
            lambda slot, nonce: True,
            lambda slot, nonce: False,
        )
        self.agent.publish(self.card)

    async def call(self, method: Method[Any, Any], *requests: Any) -> Context:
        """Makes a call as gRPC does: bytes in, bytes out."""
        return await self.serve(method, [method.request.encode(each) for each in requests])

    async def serve(self, method: Method[Any, Any], blobs: list[bytes]) -> Context:
        """Makes a call with any bytes. It never fails but by a status that a client may cause."""
        server = (self.agent if method.service == AgentCalls.SERVICE else self.coordinator)._server
        context = Context(*blobs)
        context.may_wait = method in (Calls.CLAIM, Calls.HANDOFFS, Calls.KEEP_ALIVE, Calls.WATCH_WORKERS)
        with counted(self.steps):
            await self._serve(server._services[method.service][method.name], context, blobs)
        assert context.code is not grpc.StatusCode.INTERNAL, context.details
        return context

    async def close(self) -> None:
        await self.coordinator._prefixes.close()
        await self.store.close()
        await asyncio.gather(*self.waiting, return_exceptions=True)

    async def _serve(self, handler: Any, context: Context, blobs: list[bytes]) -> None:
        """Cancels a call that only waits for another one."""
        if handler.unary_unary:
            serving = asyncio.ensure_future(handler.unary_unary(blobs[0], context))
        elif handler.unary_stream:
            serving = asyncio.ensure_future(handler.unary_stream(blobs[0], context))
        else:
            serving = asyncio.ensure_future(handler.stream_stream(None, context))
        for _ in range(_TURNS):
            if serving.done() or (handler.unary_stream and context.replies):
                break
            await asyncio.sleep(0)
        if not context.may_wait:
            await serving
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        if handler.unary_unary and not serving.cancelled():
            context.replies.append(serving.result())

    async def join(self, *cards: WorkerCard) -> None:
        for card in cards:
            await self.store.join(card, False)

    async def passes(self, seconds: float) -> None:
        """Lets what is due happen, as the store's timer does."""
        self.now += seconds
        with counted(self.steps):
            while await asyncio.create_task(self._rings()) <= self.now:
                pass

    async def _rings(self) -> float:
        return self.store._ring(0.0)

    async def offer_all(self, number: int, **changed: Any) -> None:
        for each in range(number):
            await self.store.offer(make_offer(f"r{each}")._replace(**changed))

    async def wait(self, number: int, request_id: str = "", **changed: Any) -> None:
        self.waiting += [
            self.store.claim(Claim(request_id or f"r{each}", 60.0)._replace(**changed))
            for each in range(number)
        ]


@pytest.fixture
async def state() -> AsyncIterator[State]:
    state = State()
    await state.store.start()
    await state.join(make_card(), make_card("decode", process=2))
    yield state
    await state.close()


def largest_card() -> WorkerCard:
    planes = tuple(Plane(layer // 2, layer % 2, layer) for layer in range(2_048))
    keys = (b"k",) * 128
    return replace(
        make_card("large", process=3),
        layouts=(replace(make_layout(), planes=planes),),
        region_bytes=(1 << 30,) * 4_096,
        transports=tuple(TransportCard(f"t{each}", b"", keys, (b"", b"")) for each in range(32)),
    )


def crowd() -> list[WorkerCard]:
    return [make_card(f"w{each}", process=each + 9) for each in range(9_998)]


def report() -> WorkerReport:
    links = tuple(LinkReport(f"w{each}", "tcp", False, *range(5), 0.1, 0.2) for each in range(MAX_LINKS))
    failures = tuple(FailureCount(f"reason {each}", each) for each in range(MAX_REASONS))
    return WorkerReport(1, 1.0, *range(9), links, failures, 1, 1)


def keys(number: int, seed: int = 0) -> bytes:
    return array("Q", range(seed << 40, (seed << 40) + number)).tobytes()


def prefix(name: str, num_keys: int, seed: int = 0) -> Prefix:
    return Prefix(name, 60.0, 0, 1, bytes(16), 16, keys(num_keys, seed), b"ticket")


async def an_offer_of_many_ranks(state: State) -> None:
    await state.wait(1_024, "r", num_readers=1_024)
    for rank in range(1_024):
        await state.call(Calls.OFFER, make_offer("r")._replace(rank=rank, num_ranks=1_024))


async def many_prefixes(state: State) -> None:
    """Each is one key longer than the last, and they push out the largest ones."""
    state.coordinator._prefixes._limits = replace(state.limits, prefix_bytes=4 << 20)
    many = tuple(prefix(f"p{n}", n + 1) for n in range(256))
    for seed in range(1, 20):
        await state.call(Calls.PUBLISH_PREFIXES, PrefixChanges(*OWNER, (prefix(f"q{seed}", 65_536, seed),)))
    for start in (0, 1):
        changes = PrefixChanges(*OWNER, many, tuple(f"p{n}" for n in range(start, 1_024)))
        await state.call(Calls.PUBLISH_PREFIXES, changes)


async def publish_a_chain(state: State, most_keys: int = 1_000) -> None:
    for first in range(0, most_keys, 100):
        changes = tuple(prefix(f"p{n}", n + 1) for n in range(first, first + 100))
        for part in (changes[:50], changes[50:]):
            await state.coordinator._prefixes.publish(PrefixChanges(*OWNER, part))


async def an_owner_of_prefixes_that_leaves(state: State) -> None:
    await publish_a_chain(state)
    await state.call(Calls.LEAVE, OWNER)
    while (await state.call(Calls.STATUS, Nothing())) and len(state.coordinator._prefixes._directories[""]):
        pass


async def prefixes_that_end_together(state: State) -> None:
    await publish_a_chain(state)
    state.coordinator._prefixes._clock = lambda: 1e9
    await state.call(Calls.FIND_PREFIX, PrefixQuery(bytes(16), 16, keys(9)))


async def an_overview(state: State) -> None:
    await state.join(*crowd())
    long = report()
    for card in crowd():
        for _ in range(2):
            state.coordinator._reports.note("", Beat(card.worker_id, 1, long))
    await state.call(Calls.OVERVIEW, Nothing())


async def tickets_that_end_together(state: State) -> None:
    await state.offer_all(MANY)
    await state.passes(60.0)


async def claims_that_end_together(state: State) -> None:
    await state.wait(MANY)
    await state.passes(60.0)


async def workers_that_die_together(state: State) -> None:
    await state.join(*crowd())
    await state.offer_all(MANY)
    await state.passes(60.0)


async def a_worker_on_etcd_that_ends(state: State) -> None:
    """etcd deletes its keys in one revision, which the mirror gets in one message."""
    layout, now = Keys("fleet"), 0.0
    mirror = Mirror(layout, state.limits)
    kvs = {layout.worker("prefill"): StoredRecords.CARD.encode(make_card())}
    kvs |= {layout.ticket(f"r{n}", 0): StoredRecords.OFFER.encode(make_offer(f"r{n}")) for n in range(MANY)}
    put = [pb.Event(kv=pb.KeyValue(key=key, value=value, mod_revision=1)) for key, value in kvs.items()]
    gone = [pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key, mod_revision=2)) for key in reversed(kvs)]
    news: list[News] = []
    sync = Sync(Etcd("127.0.0.1:1", FakeEtcd()), layout, mirror, news.append, lambda: False, lambda: now)
    for revision in (put, gone):
        with counted(state.steps):
            await asyncio.create_task(sync._take([revision]))
    whys = {mirror.why_ended(f"r{n}").sentence.partition(": ")[2] for n in range(MANY)}  # type: ignore[union-attr]
    assert whys == {"worker 'prefill' stopped beating; recompute it"}, "workers come first"
    assert (mirror.members, mirror.requests, len(mirror.due)) == ({}, {}, 0)


async def an_agents_calls(state: State) -> None:
    await state.call(AgentCalls.GET_CARD, Nothing())
    await state.call(AgentCalls.CONNECT, ConnectRequest(*OWNER, "tcp", (bytes(64 << 10),) * 64, True))
    await state.call(AgentCalls.SETTLE_SEAT, SettleOrder(*OWNER, 1, 2))
    await state.call(AgentCalls.RENEW_SEATS, Renewal(*OWNER, [(n, n) for n in range(1_024)]))
    await state.call(AgentCalls.DRAIN, OWNER)


async def all_tickets(state: State) -> None:
    await state.offer_all(state.limits.tickets_per_worker)


async def crowded(state: State) -> None:
    await state.join(*crowd())


async def nothing(state: State) -> None:
    pass


def handoffs(*batch: Any) -> tuple[Any, ...]:
    return Calls.HANDOFFS, HandoffBatch(*batch, ())


CALLS: dict[str, tuple[Any, ...]] = {
    "a_large_join": (nothing, Calls.JOIN, JoinRequest(largest_card())),
    "a_join_after_a_restart": (all_tickets, Calls.JOIN, JoinRequest(make_card(process=4))),
    "a_leave_with_all_tickets": (all_tickets, Calls.LEAVE, OWNER),
    "a_beat_with_a_long_report": (nothing, Calls.KEEP_ALIVE, Beat(*OWNER, report()), Beat(*OWNER, report())),
    "the_largest_card": (
        lambda state: state.join(largest_card()),
        Calls.GET_WORKER,
        WorkerEpoch("large", 1),
    ),
    "all_cards": (crowded, Calls.LIST_WORKERS, Nothing()),
    "a_watch_of_all": (crowded, Calls.WATCH_WORKERS, Watch()),
    "a_status": (crowded, Calls.STATUS, Nothing()),
    "an_offer_that_all_wait_for": (
        lambda state: state.wait(state.limits.waiting_claims, "r", num_readers=1_024),
        Calls.OFFER,
        make_offer("r"),
    ),
    "a_claim_beside_all_others": (
        lambda state: state.wait(state.limits.waiting_claims - 1, "r"),
        Calls.CLAIM,
        Claim("r", 0.0),
    ),
    "a_settle": (nothing, Calls.SETTLE, SettleOrder(*OWNER, 1, 2)),
    "a_batch_of_offers": (nothing, *handoffs([make_offer(f"r{n}") for n in range(1_024)], [], [])),
    "a_batch_of_refused_offers": (
        nothing,
        *handoffs([make_offer(f"r{n}", "another") for n in range(1_024)], [], []),
    ),
    "a_batch_of_settles": (nothing, *handoffs([], [SettleOrder(*OWNER, n, n) for n in range(1_024)], [])),
    "a_batch_of_claims": (
        lambda state: state.offer_all(1_024),
        *handoffs([], [], [Claim(f"r{n}", 1.0) for n in range(1_024)]),
    ),
    "an_owner_that_asks_for_its_own": (
        publish_a_chain,
        Calls.FIND_PREFIX,
        PrefixQuery(bytes(16), 16, keys(1_000), worker_id=OWNER.worker_id),
    ),
}
"""Each has what brings the state there, and the call with its requests."""

CASES = [
    an_offer_of_many_ranks, many_prefixes, an_owner_of_prefixes_that_leaves, prefixes_that_end_together, an_overview,
    tickets_that_end_together, claims_that_end_together, workers_that_die_together, a_worker_on_etcd_that_ends,
    an_agents_calls,
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
async def test_no_turn_of_a_call_is_long(state: State, name: str) -> None:
    prepare, *call = CALLS[name]
    await prepare(state)
    await state.call(*call)
    print(name, state.steps.most, state.steps.total)
    assert state.steps.most <= MOST


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
async def test_no_turn_is_long(state: State, case: Callable[[State], Awaitable[None]]) -> None:
    await case(state)
    print(case.__name__, state.steps.most, state.steps.total)
    assert state.steps.most <= MOST
