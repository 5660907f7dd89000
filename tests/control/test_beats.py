# SPDX-License-Identifier: Apache-2.0
"""A worker leaves a silent coordinator while its lease still runs. In virtual time."""

from __future__ import annotations

import asyncio
import math
import random

import pytest
from control.replicas import LEASE_S, MEMBERSHIP, Replica, joined
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import run

from kvlink.control import SessionState
from kvlink.control.beats import Beats
from kvlink.control.values import Membership
from kvlink.runtime.supervised import failures


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


@pytest.mark.parametrize(
    ("keep_alive_s", "lease_s", "waited_s", "spread_s"),
    [(2.5, 10.0, 0.0, 2.5), (2.5, 10.0, 6.0, 2.0), (9.0, 30.0, 0.0, 3.0), (2.5, 10.0, 10.5, 0.0)],
    ids=["a beat", "half of what is left of the lease", "a bound", "no time left"],
)
def test_who_rejoins_waits_so_long_at_most(
    keep_alive_s: float, lease_s: float, waited_s: float, spread_s: float
) -> None:
    assert Beats(Membership(1, lease_s, keep_alive_s), 5.0).spread_s(5.0 + waited_s) == spread_s


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
        before = failures().get("session")
        first.hangs = True
        await asyncio.sleep(60.0)
        assert session.state is SessionState.REJOINING
        assert failures().get("session") == before, "a silent coordinator is not an error of the session"
        first.go_on()
        await asyncio.sleep(10.0)
        assert session.state is SessionState.JOINED
        await session.close()

    run(main)
