# SPDX-License-Identifier: Apache-2.0
"""Offers that a coordinator refuses for now are sent again until it accepts them or they expire. In virtual time."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import cast

import pytest
from control.cards import make_card, make_offer
from virtual_time import run

from kvlink.control import CoordinatorClient, Offer, Session, SessionState
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.refusal import Overloaded
from kvlink.control.values import Membership, Push, PushKind
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable
from kvlink.runtime.backoff import FIRST_S
from kvlink.runtime.supervised import failures
from kvlink.types import WorkerCard

_LEASE_S = 10.0


class _Beats:
    def __init__(self, coordinator: Coordinator) -> None:
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


class Coordinator:
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

    def handoffs(self) -> Coordinator:
        return self

    async def __aenter__(self) -> Coordinator:
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


async def rejoined(coordinator: Coordinator, refuses: Exception, **ttls: float) -> Session:
    """A worker whose coordinator forgot its offers, and refuses them when they are sent again."""
    session = await Session.join(cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None)
    for request_id, ttl_s in ttls.items():
        await session.offer(make_offer(request_id, ttl_s=ttl_s))
    coordinator.accepted.clear()
    coordinator.attempts.clear()
    coordinator.refuses = refuses
    session._rejoin_soon()
    await asyncio.sleep(1.0)
    assert (session.state, session.num_rejoins) == (SessionState.JOINED, 1)
    return session


def test_a_refused_offer_is_sent_again_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await rejoined(coordinator, Overloaded("full"), short=5.0, ended=600.0, long=600.0)
        session.forget("ended")
        await asyncio.sleep(30.0)
        last = {
            name: max(at for at, of in coordinator.attempts if of == name)
            for name in ("short", "ended", "long")
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

    run(main)
    (line,) = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert line == "the coordinator refused offers for now, retrying worker=prefill offers=3"


def test_a_worker_waits_before_it_rejoins_unless_there_is_something_to_offer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "uniform", lambda least, most: most)

    async def main(offers_after_s: float | None) -> float:
        coordinator = Coordinator()
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


def test_a_coordinator_that_cannot_be_reached_gets_the_offer_when_it_is_back() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
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

    run(main)


def test_an_offer_waits_for_the_coordinator_as_long_as_it_may() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
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

    run(main)


def test_an_offer_that_waits_is_refused_when_the_session_closes() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
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

    run(main)


def test_a_worker_beats_as_its_last_join_says() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
        for lease_s, num_beats in ((_LEASE_S, 24), (6 * _LEASE_S, 4)):
            coordinator.lease_s = lease_s
            session._rejoin_soon()
            await asyncio.sleep(1.0)
            coordinator.beats.clear()
            await asyncio.sleep(60.0)
            assert abs(len(coordinator.beats) - num_beats) <= 1
        await session.close()

    run(main)


@pytest.mark.parametrize("good", [True, False], ids=["a report", "what is none"])
def test_a_beat_has_the_report_if_that_can_be_sent(good: bool) -> None:
    report = WorkerReport(1, 2, 3, 4) if good else cast(WorkerReport, object())

    async def main() -> None:
        coordinator = Coordinator()
        client = cast(CoordinatorClient, coordinator)
        session = await Session.join(client, make_card(), lambda slot, nonce: None, report=lambda: report)
        await asyncio.sleep(10.0)
        assert (session.state, len(coordinator.joins)) == (SessionState.JOINED, 1)
        assert {beat.report for beat in coordinator.beats} == {report if good else None}
        await session.close()

    run(main)


def test_a_coordinator_that_opens_no_stream_is_joined_again() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        coordinator.has_replicas, coordinator.has_no_streams = False, True
        before = failures().get("session")
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
        await asyncio.sleep(20.0)
        assert len(coordinator.joins) > 2
        coordinator.has_no_streams = False
        await asyncio.sleep(20.0)
        assert (session.state, failures().get("session")) == (SessionState.JOINED, before)
        assert coordinator.beats
        await session.close()

    run(main)


def test_an_offer_that_would_be_refused_for_ever_is_not_sent_again() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await rejoined(coordinator, ConfigError("malformed"), r=600.0)
        await asyncio.sleep(60.0)
        assert len(coordinator.attempts) == 1
        await session.close()

    run(main)


def test_a_session_ends_while_offers_are_refused() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await rejoined(coordinator, Overloaded("full"), r=600.0)
        await session.close()
        num_attempts = len(coordinator.attempts)
        await asyncio.sleep(60.0)
        assert len(coordinator.attempts) == num_attempts

    run(main)


def test_a_coordinator_that_hangs_after_a_join_is_left_and_the_next_one_gets_the_offers() -> None:
    async def main() -> None:
        coordinator = Coordinator()
        session = await Session.join(
            cast(CoordinatorClient, coordinator), make_card(), lambda slot, nonce: None
        )
        await session.offer(make_offer("r", ttl_s=600.0))
        coordinator.accepted.clear()
        coordinator.hangs = True
        session._rejoin_soon()
        await asyncio.sleep(2 * _LEASE_S)
        assert (session.state, session.num_rejoins) == (SessionState.JOINED, 1)
        assert list(coordinator.accepted) == ["r"]
        await session.close()

    run(main)
