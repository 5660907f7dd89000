# SPDX-License-Identifier: Apache-2.0
"""Leases of workers end in time, also if the coordinator itself did not run."""

from __future__ import annotations

import asyncio
import time

import pytest
from control.cards import make_card

from kvlink.control.limits import Limits
from kvlink.coordinator.store.members import BEATS_PER_LEASE, Members
from kvlink.coordinator.store.memory import MemoryStore

LEASE_S = 9.0
BEAT_S = LEASE_S / BEATS_PER_LEASE


@pytest.fixture
def members() -> Members:
    members = Members(LEASE_S, Limits())
    for worker_id in ("a", "b"):
        members.join(make_card(worker_id), rejoin=False, now=0.0)
    return members


def lost(members: Members, now: float, late_s: float = 0.0) -> list[str]:
    return [change.card.worker_id for change in members.expire(now, late_s)]


def test_who_is_silent_for_a_lease_is_lost(members: Members) -> None:
    assert lost(members, LEASE_S - 0.1) == []
    assert members.beat("a", 1, LEASE_S - 0.1)
    assert lost(members, LEASE_S, late_s=0.01) == ["b"]
    assert not members.beat("b", 1, LEASE_S)


def test_who_comes_late_hears_first_and_only_once(members: Members) -> None:
    now = LEASE_S + 20.0
    assert lost(members, now, late_s=20.0) == []
    assert members.next_deadline() == now + BEAT_S
    assert members.beat("a", 1, now + 0.1)
    assert lost(members, now + BEAT_S + 5.0, late_s=5.0) == ["b"]
    now += 0.1 + LEASE_S + 5.0
    assert lost(members, now, late_s=5.0) == [], "its beat made up for the first time"
    assert lost(members, now + BEAT_S) == ["a"]


@pytest.mark.verify
async def test_a_coordinator_without_a_cpu_blames_nobody() -> None:
    store = MemoryStore(lease_s=1.5)
    await store.start()
    await store.join(make_card("beats"), rejoin=False)
    await store.join(make_card("silent"), rejoin=False)
    time.sleep(1.8)  # so this loop runs nothing
    await asyncio.sleep(0)
    assert await store.beat("beats", 1)
    while len(await store.workers()) > 1:
        await asyncio.sleep(0.01)
    assert [card.worker_id for card in await store.workers()] == ["beats"]
    await store.close()
