# SPDX-License-Identifier: Apache-2.0
"""Offers that are refused or withdrawn: they are sent again, or go to another reader."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import cast

import pytest
from control.cards import make_card, make_offer
from control.fake_etcd import FakeEtcd
from control.watching import holds
from virtual_time import run, virtual
from waiting import until

from kvlink.control import Claim, CoordinatorClient, Offer, Session, SessionState, SettleOrder
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.refusal import Overloaded
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.values import Membership, Push, PushKind
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable, UnknownRequest
from kvlink.runtime.backoff import FIRST_S
from kvlink.runtime.supervised import failures
from kvlink.types import WorkerCard

_LEASE_S = 10.0


class _Beats:
    def __init__(self, coordinator: RefusingCoordinator) -> None:
        self._coordinator = coordinator
        self._pushes: asyncio.Queue[Push | None] = asyncio.Queue()

    async def send(self, beat: Beat) -> None:
        CoordinatorCalls.KEEP_ALIVE.request.encode(beat)
        self._coordinator.beats.append(beat)
        if not self._coordinator.hangs:
            self._pushes.put_nowait(Push(PushKind.ACK))

    def avoid_server(self) -> None:
        self._coordinator.hangs = False

    async def receive(self) -> Push | None:
        return await self._pushes.get()

    def end(self) -> None:
        """Ends the stream at the coordinator."""
        self._pushes.put_nowait(None)

    def cancel(self) -> None:
        pass


class RefusingCoordinator:
    """As CoordinatorClient and its handoff stream. Refuses offers with `refuses` while that is set."""

    address = "simulated"
    has_replicas = True

    def __init__(self) -> None:
        self.refuses: Exception | None = None
        self.hangs = False
        """Joins are accepted, and neither beats nor offers are answered, until a client goes elsewhere."""
        self.away = False
        """Joins fail."""
        self.has_no_streams = False
        self.lease_s = _LEASE_S
        self.beats: list[Beat] = []
        self.joins: list[float] = []
        self.streams: list[_Beats] = []
        self.attempts: list[tuple[float, str]] = []
        self.accepted: dict[str, Offer] = {}

    async def join(self, card: WorkerCard, rejoin: bool = False, timeout_s: float = 5.0) -> Membership:
        if self.away:
            raise CoordinatorUnavailable("away")
        self.joins.append(asyncio.get_running_loop().time())
        return Membership(1, self.lease_s, self.lease_s / 4)

    def keep_alive(self) -> _Beats:
        if self.has_no_streams:
            raise CoordinatorUnavailable("away")
        self.streams.append(_Beats(self))
        return self.streams[-1]

    async def leave(self, worker_id: str, epoch: int, timeout_s: float = 1.0) -> None:
        pass

    def handoffs(self) -> RefusingCoordinator:
        return self

    async def __aenter__(self) -> RefusingCoordinator:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def offer(self, offer: Offer, timeout_s: float = 5.0) -> None:
        self.attempts.append((asyncio.get_running_loop().time(), offer.request_id))
        if self.refuses is not None:
            raise self.refuses
        if self.hangs:
            await asyncio.Event().wait()
        self.accepted[offer.request_id] = offer


async def joined(coordinator: RefusingCoordinator) -> Session:
    return await Session.join(cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None)


async def rejoined(coordinator: RefusingCoordinator, refuses: Exception, **ttls: float) -> Session:
    """A worker whose coordinator forgot its offers, and refuses them when they are sent again."""
    session = await joined(coordinator)
    for request_id, ttl_s in ttls.items():
        await session.offer(make_offer(request_id, ttl_s=ttl_s))
    coordinator.accepted.clear()
    coordinator.attempts.clear()
    coordinator.refuses = refuses
    session._rejoin_soon()
    await asyncio.sleep(1.0)
    assert (session.state, session.num_rejoins) == (SessionState.JOINED, 1)
    return session


@virtual
async def test_a_refused_offer_is_sent_again_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = RefusingCoordinator()
    session = await rejoined(coordinator, Overloaded("full"), short=5.0, ended=600.0, long=600.0)
    session.forget("ended")
    await asyncio.sleep(30.0)
    last = {
        name: max(at for at, of in coordinator.attempts if of == name) for name in ("short", "ended", "long")
    }
    assert last["ended"] <= 1.0
    assert 1.0 < last["short"] <= 5.0, "never after its time"
    assert 28.0 < last["long"] <= 31.0
    assert len(coordinator.attempts) < 70, "at most every second, after a few quick ones"
    coordinator.refuses = None
    await asyncio.sleep(2.0)
    (accepted,) = coordinator.accepted.values()
    assert accepted.request_id == "long"
    assert 600.0 - 33.0 <= accepted.ttl_s <= 600.0 - 31.0, "it keeps the time that it had"
    num_attempts = len(coordinator.attempts)
    await asyncio.sleep(60.0)
    assert (len(coordinator.attempts), session.num_rejoins) == (num_attempts, 1)
    await session.close()
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert line == "the coordinator refused offers for now, retrying worker=prefill offers=3"


@virtual
async def test_an_offer_that_waited_is_sent_with_the_time_that_it_has_left() -> None:
    coordinator, clock = RefusingCoordinator(), asyncio.get_running_loop().time
    session = await joined(coordinator)
    sent: list[tuple[float, float]] = []
    take = coordinator.offer

    async def noted(offer: Offer, timeout_s: float = 5.0) -> None:
        sent.append((clock() + offer.ttl_s, timeout_s))
        await take(offer, timeout_s)

    coordinator.offer = noted  # type: ignore[method-assign]
    await asyncio.sleep(1.0)
    coordinator.away = True
    coordinator.streams[-1].end()
    await asyncio.sleep(1.0)
    ends = clock() + 30.0
    offering = asyncio.create_task(session.offer(make_offer("r", ttl_s=30.0), timeout_s=29.9))
    await asyncio.sleep(20.0)
    assert sent == []
    coordinator.away = False
    await offering
    assert len(sent) == 2, "by the rejoin, and by whoever waited"
    assert [due for due, _ in sent] == pytest.approx([ends, ends])
    assert max(timeout_s for _, timeout_s in sent) < 10.0
    await session.close()


@virtual
async def test_what_has_expired_is_not_kept() -> None:
    session = await joined(RefusingCoordinator())
    await session.offer(make_offer("short", ttl_s=1.0))
    await session.offer(make_offer("long", ttl_s=60.0))
    await asyncio.sleep(2.0)
    await session.offer(make_offer("next", ttl_s=60.0))
    assert [*session._offers] == ["long", "next"]
    await session.close()


def test_a_worker_waits_before_it_rejoins_unless_there_is_something_to_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)

    async def main(offers_after_s: float | None) -> float:
        coordinator = RefusingCoordinator()
        coordinator.has_replicas = False
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
        await asyncio.sleep(1.0)
        coordinator.joins.clear()
        coordinator.streams[-1].end()
        await asyncio.sleep(0.0)
        if offers_after_s is not None:
            await asyncio.sleep(offers_after_s)
            await session.offer(make_offer("r"))
            assert list(coordinator.accepted) == ["r"]
        await asyncio.sleep(60.0)
        (at,) = coordinator.joins
        await session.close()
        return at - 1.0

    assert run(partial(main, None)) == pytest.approx(2.5 + FIRST_S)
    assert run(partial(main, 1.0)) == pytest.approx(1.0 + FIRST_S)


@virtual
async def test_a_coordinator_that_cannot_be_reached_gets_the_offer_when_it_is_back() -> None:
    coordinator = RefusingCoordinator()
    session = await joined(coordinator)
    coordinator.refuses = CoordinatorUnavailable("away")
    with pytest.raises(CoordinatorUnavailable, match="away"):
        await session.offer(make_offer("r", ttl_s=600.0))
    await asyncio.sleep(10.0)
    assert (session.num_rejoins, coordinator.accepted) == (0, {})
    assert len(coordinator.joins) > 4, "it rejoins until all offers could be sent"
    coordinator.refuses = None
    await asyncio.sleep(10.0)
    assert (session.num_rejoins, list(coordinator.accepted)) == (1, ["r"])
    await session.close()


@virtual
async def test_an_offer_waits_for_the_coordinator_as_long_as_it_may() -> None:
    coordinator = RefusingCoordinator()
    session = await joined(coordinator)
    coordinator.away = True
    session._rejoin_soon()
    at = asyncio.get_running_loop().time()
    with pytest.raises(CoordinatorUnavailable, match="'r' is not offered yet"):
        await session.offer(make_offer("r", ttl_s=600.0), timeout_s=30.0)
    assert asyncio.get_running_loop().time() == at + 30.0
    coordinator.away = False
    await asyncio.sleep(5.0)
    assert list(coordinator.accepted) == ["r"]
    await session.close()


@virtual
async def test_an_offer_that_waits_is_refused_when_the_session_closes() -> None:
    coordinator = RefusingCoordinator()
    session = await joined(coordinator)
    coordinator.away = True
    session._rejoin_soon()
    waiting = asyncio.ensure_future(session.offer(make_offer("r"), timeout_s=30.0))
    await asyncio.sleep(1.0)
    at = asyncio.get_running_loop().time()
    await session.close()
    with pytest.raises(CoordinatorError, match="is closed"):
        await waiting
    assert asyncio.get_running_loop().time() == at
    assert len(session._deadlines) == 0, "it is not to be sent again"


@virtual
async def test_a_worker_beats_as_its_last_join_says() -> None:
    coordinator = RefusingCoordinator()
    session = await joined(coordinator)
    for lease_s, num_beats in ((_LEASE_S, 24), (6 * _LEASE_S, 4)):
        coordinator.lease_s = lease_s
        session._rejoin_soon()
        await asyncio.sleep(1.0)
        coordinator.beats.clear()
        await asyncio.sleep(60.0)
        assert abs(len(coordinator.beats) - num_beats) <= 1
    await session.close()


@pytest.mark.parametrize("good", [True, False], ids=["a report", "what is none"])
@virtual
async def test_a_beat_has_the_report_if_that_can_be_sent(good: bool) -> None:
    report = WorkerReport(1, 2, 3, 4) if good else cast(WorkerReport, object())
    coordinator = RefusingCoordinator()
    client = cast(CoordinatorClient, coordinator)
    session = await Session.join(client, make_card(), lambda slot, nonce: None, report=lambda: report)
    await asyncio.sleep(10.0)
    assert (session.state, len(coordinator.joins)) == (SessionState.JOINED, 1)
    assert {beat.report for beat in coordinator.beats} == {report if good else None}
    await session.close()


@virtual
async def test_a_coordinator_that_opens_no_stream_is_joined_again() -> None:
    coordinator = RefusingCoordinator()
    coordinator.has_replicas, coordinator.has_no_streams = False, True
    before = failures().get("session")
    session = await joined(coordinator)
    await asyncio.sleep(20.0)
    assert len(coordinator.joins) > 2
    coordinator.has_no_streams = False
    await asyncio.sleep(20.0)
    assert (session.state, failures().get("session")) == (SessionState.JOINED, before)
    assert coordinator.beats
    await session.close()


@virtual
async def test_an_offer_that_would_be_refused_for_ever_is_not_sent_again() -> None:
    coordinator = RefusingCoordinator()
    session = await rejoined(coordinator, ConfigError("malformed"), r=600.0)
    await asyncio.sleep(60.0)
    assert len(coordinator.attempts) == 1
    await session.close()


@virtual
async def test_a_session_ends_while_offers_are_refused() -> None:
    coordinator = RefusingCoordinator()
    session = await rejoined(coordinator, Overloaded("full"), r=600.0)
    await session.close()
    num_attempts = len(coordinator.attempts)
    await asyncio.sleep(60.0)
    assert len(coordinator.attempts) == num_attempts


@virtual
async def test_a_coordinator_that_hangs_after_a_join_is_left_and_the_next_one_gets_the_offers() -> None:
    coordinator = RefusingCoordinator()
    session = await joined(coordinator)
    await session.offer(make_offer("r", ttl_s=600.0))
    coordinator.accepted.clear()
    coordinator.hangs = True
    session._rejoin_soon()
    await asyncio.sleep(2 * _LEASE_S)
    assert (session.state, session.num_rejoins) == (SessionState.JOINED, 1)
    assert list(coordinator.accepted) == ["r"]
    await session.close()


TICKET = make_offer("r").ticket


def over_fake_etcd() -> Store:
    return EtcdStore("etcd://127.0.0.1:1/fleet", trust=FakeEtcd())


@pytest.fixture(params=[MemoryStore, over_fake_etcd])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[CoordinatorClient]:
    """Yields a client of a coordinator over each store, with one worker."""
    coordinator = Coordinator(request.param())
    async with CoordinatorClient(await coordinator.start()) as client:
        await client.join(make_card())
        yield client
    await coordinator.close()


@asynccontextmanager
async def deaf(
    client: CoordinatorClient, patch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[HandoffStream, list[object]]]:
    """A stream that does not check the results that it receives."""
    async with client.handoffs() as stream:
        unread: list[object] = []
        patch.setattr(stream, "_resolve", unread.append)
        yield stream, unread


@pytest.mark.parametrize("claim_id", [b"", b"mine"])
async def test_tickets_on_their_way_to_a_withdrawn_claim_go_to_another(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch, claim_id: bytes
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        given_up = stream.claim(Claim("r", 30.0, claim_id=claim_id))
        await until(lambda: holds(client, "waiting_claims"))
        await client.offer(make_offer("r"))
        await until(lambda: unread)
        given_up.cancel()
        assert await client.claim("r", timeout_s=10.0) == [TICKET]
        with pytest.raises(UnknownRequest):
            await client.claim("r", timeout_s=0.0)


async def test_they_go_to_one_that_waits_already(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        await client.offer(make_offer("r"))
        given_up = stream.claim(Claim("r", 30.0))
        await until(lambda: unread)
        async with client.handoffs() as other:
            waits = other.claim(Claim("r", 30.0))
            await until(lambda: holds(client, "waiting_claims"))
            given_up.cancel()
            assert await waits == [TICKET]


async def test_other_readers_of_the_request_keep_theirs(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        await client.offer(make_offer("r", seats=2))
        assert await client.claim("r", 10.0, reader=0, num_readers=2) == [TICKET]
        given_up = stream.claim(Claim("r", 30.0, 1, 2, b"mine"))
        await until(lambda: unread)
        given_up.cancel()
        assert await client.claim("r", 10.0, reader=1, num_readers=2) == [TICKET]
        with pytest.raises(UnknownRequest):
            await client.claim("r", timeout_s=0.0)


async def test_all_ranks_come_back(client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch) -> None:
    await client.join(make_card("second", process=2))
    offers = [make_offer("r", of=2), make_offer("r", "second", rank=1, of=2)]
    async with deaf(client, monkeypatch) as (stream, unread):
        for offer in offers:
            await client.offer(offer)
        given_up = stream.claim(Claim("r", 30.0))
        await until(lambda: unread)
        given_up.cancel()
        assert await client.claim("r", timeout_s=10.0) == [offer.ticket for offer in offers]


async def test_a_worker_that_left_does_not_come_back_with_its_ticket(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with deaf(client, monkeypatch) as (stream, unread):
        await client.offer(make_offer("r"))
        given_up = stream.claim(Claim("r", 30.0))
        await until(lambda: unread)
        await client.leave("prefill", 1)
        given_up.cancel()
        stream.settle(SettleOrder("prefill", 1, 1, 1))  # is answered after the withdrawal
        await until(lambda: len(unread) == 2)
        with pytest.raises(UnknownRequest):
            await client.claim("r", timeout_s=0.0)
        assert (await client.status()).tickets == 0


@pytest.mark.parametrize("why", [asyncio.CancelledError(), CoordinatorUnavailable("no answer")], ids=repr)
async def test_a_single_claim_whose_answer_got_lost_brings_its_tickets_when_made_again(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch, why: BaseException
) -> None:
    attempt: Callable[..., object] = client._channel.attempt

    async def lost(*args: object) -> None:
        await attempt(*args)
        raise why

    await client.offer(make_offer("r"))
    with monkeypatch.context() as patched:
        patched.setattr(client._channel, "attempt", lost)
        with pytest.raises(type(why)):
            await client.claim("r", timeout_s=0.0)
    with pytest.raises(UnknownRequest):
        await client.claim("r", timeout_s=0.0, reader=1, num_readers=2)
    assert await client.claim("r", timeout_s=0.0) == [TICKET]
    with pytest.raises(UnknownRequest):
        await client.claim("r", timeout_s=0.0)
