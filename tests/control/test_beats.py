# SPDX-License-Identifier: Apache-2.0
"""A worker leaves a silent coordinator while its lease still runs. In virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from typing import cast

import pytest
from control.cards import make_card
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run

from kvlink.control import CoordinatorClient, Session, SessionState
from kvlink.control.beats import Beats
from kvlink.control.overview import Beat
from kvlink.control.values import Membership, Push, PushKind
from kvlink.errors import CoordinatorUnavailable
from kvlink.types import WorkerCard

LEASE_S = 10.0
MEMBERSHIP = Membership(1, LEASE_S, LEASE_S / 4)


def test_nothing_is_given_up_while_no_beat_is_under_way() -> None:
    beats = Beats(MEMBERSHIP, 100.0)
    assert beats.give_up_at() == math.inf
    beats.sent(100.0)
    beats.answered()
    assert beats.give_up_at() == math.inf


def test_patience_counts_from_when_the_answered_beat_was_sent() -> None:
    beats = Beats(MEMBERSHIP, 0.0)
    for now in (0.0, 2.5, 5.0):
        beats.sent(now)
    assert beats.give_up_at() == pytest.approx(20 / 3)
    beats.answered()
    assert beats.give_up_at() == pytest.approx(20 / 3)
    beats.answered()
    assert beats.give_up_at() == pytest.approx(2.5 + 20 / 3)


@given(st.lists(st.floats(0.0, 5.0), max_size=12), st.integers(0, 12), st.floats(0.0, 30.0))
def test_who_gives_up_has_a_third_of_the_lease_left(gaps: list[float], answers: int, later: float) -> None:
    """The coordinator renewed the lease when the beat arrived, which was not before it was sent."""
    beats, now, sent = Beats(MEMBERSHIP, 0.0), 0.0, [0.0]
    for gap in gaps:
        now += gap
        beats.sent(now)
        sent.append(now)
    for _ in range(min(answers, len(gaps))):
        beats.answered()
    renewed = sent[min(answers, len(gaps))]
    if answers < len(gaps):
        assert beats.give_up_at() <= renewed + LEASE_S * 2 / 3
    assert now + later + beats.spread_s(now + later) <= max(renewed + LEASE_S, now + later)


class Replica:
    """A coordinator of a simulated world."""

    def __init__(self) -> None:
        self.hangs = False
        self.joined: list[float] = []
        self.beaten: list[float] = []
        self._unread: list[_Stream] = []

    def take_beat(self, stream: _Stream) -> None:
        self._unread.append(stream)
        if not self.hangs:
            self.go_on()

    def go_on(self) -> None:
        """It reads what came while it stood still."""
        self.hangs = False
        for stream in self._unread:
            self.beaten.append(asyncio.get_running_loop().time())
            stream.pushes.put_nowait(Push(PushKind.ACK))
        self._unread.clear()


class _Stream:
    def __init__(self, at: Replica, leave: Callable[[], None]) -> None:
        self._at = at
        self.pushes: asyncio.Queue[Push] = asyncio.Queue()
        self.avoid_server = leave

    async def send(self, beat: Beat) -> None:
        self._at.take_beat(self)

    async def receive(self) -> Push:
        return await self.pushes.get()

    def cancel(self) -> None:
        pass


class Client:
    """As CoordinatorClient, with `replicas` behind it."""

    def __init__(self, *replicas: Replica) -> None:
        self._ends = list(replicas)
        self.has_replicas = len(replicas) > 1
        self.address = "simulated"

    async def join(self, card: WorkerCard, rejoin: bool = False, timeout_s: float = 5.0) -> Membership:
        at = self._ends[0]
        if at.hangs:
            await asyncio.sleep(timeout_s)
            self._leave()
            raise CoordinatorUnavailable("silent")
        at.joined.append(asyncio.get_running_loop().time())
        return MEMBERSHIP

    def keep_alive(self) -> _Stream:
        return _Stream(self._ends[0], self._leave)

    async def leave(self, worker_id: str, epoch: int, timeout_s: float = 1.0) -> None:
        pass

    def _leave(self) -> None:
        self._ends.append(self._ends.pop(0))


async def joined(*replicas: Replica) -> Session:
    client = cast(CoordinatorClient, Client(*replicas))
    return await Session.join(client, make_card(), lambda slot, nonce: None)


@pytest.mark.parametrize("hangs_after", [0.0, 1.0, 2.4, 2.6, 7.0, 1234.5])
def test_it_has_joined_another_before_its_lease_ends(hangs_after: float) -> None:
    async def main() -> None:
        first, second = Replica(), Replica()
        session = await joined(first, second)
        await asyncio.sleep(hangs_after)
        first.hangs = True
        await asyncio.sleep(2 * LEASE_S)
        (at,) = second.joined
        renewed = max(first.beaten, default=0.0)
        assert renewed + LEASE_S / 2 < at < renewed + LEASE_S * 0.7
        assert (session.state, session.num_rejoins) == (SessionState.JOINED, 1)
        await session.close()

    run(main)


@pytest.mark.parametrize("seed", range(20))
def test_idle_workers_of_a_lone_coordinator_spread_within_their_leases(seed: int) -> None:
    async def main() -> list[float]:
        random.seed(seed)
        only = Replica()
        sessions = [await joined(only) for _ in range(8)]
        await asyncio.sleep(1.0)
        only.hangs = True
        await asyncio.sleep(5.0)
        only.hangs = False  # what was sent meanwhile is lost with its connection
        await asyncio.sleep(LEASE_S)
        again = only.joined[8:]
        assert len(again) == 8
        for session in sessions:
            await session.close()
        return again

    again = run(main)
    assert max(again) <= LEASE_S
    assert max(again) - min(again) > 0.3, "they come one after the other"


def test_a_coordinator_that_is_slow_is_kept() -> None:
    async def main() -> None:
        first, second = Replica(), Replica()
        session = await joined(first, second)
        for _ in range(100):
            await asyncio.sleep(3.0)
            first.hangs = True
            await asyncio.sleep(4.0)
            first.go_on()
        assert (second.joined, session.num_rejoins) == ([], 0)
        await session.close()

    run(main)


def test_a_session_whose_world_is_silent_says_so() -> None:
    async def main() -> None:
        first = Replica()
        session = await joined(first)
        first.hangs = True
        await asyncio.sleep(60.0)
        assert session.state is SessionState.REJOINING
        first.go_on()
        await asyncio.sleep(10.0)
        assert session.state is SessionState.JOINED
        await session.close()

    run(main)
