# SPDX-License-Identifier: Apache-2.0
"""Joins, leases and watches of a store follow its contract."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
from control.cards import make_card, make_offer
from control.store.stages import LEASE_S, Stage, refused

from kvlink.control.refusal import Reason, Refused
from kvlink.control.values import Claim
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.types import Joined, WorkerChange


async def test_a_first_join_gets_what_it_proposes_and_never_less_than_one(store: Store) -> None:
    assert await store.join(make_card("a", epoch=0), rejoin=False) == 1
    assert await store.join(make_card("b", epoch=1_700_000_000), rejoin=False) == 1_700_000_000


async def test_the_same_process_keeps_its_epoch_and_may_publish_another_card(store: Store) -> None:
    card = make_card(epoch=5)
    await store.join(card, rejoin=False)
    moved = replace(card, agent="127.0.0.1:2")
    assert await store.join(replace(moved, epoch=77), rejoin=False) == 5
    assert await store.worker(card.worker_id, 5) == moved


async def test_another_process_of_the_name_gets_a_higher_epoch(store: Store) -> None:
    await store.join(make_card(epoch=5, process=1), rejoin=False)
    assert await store.join(make_card(epoch=5, process=2), rejoin=False) == 6
    assert await store.join(make_card(epoch=90, process=3), rejoin=False) == 90


async def test_an_epoch_is_remembered_after_the_worker_left_or_died(stage: Stage) -> None:
    await stage.store.join(make_card("left", epoch=5), rejoin=False)
    await stage.store.leave("left", 5)
    await stage.store.join(make_card("died", epoch=5), rejoin=False)
    await stage.pass_time(2 * LEASE_S)
    assert await stage.store.join(make_card("left", epoch=1, process=2), rejoin=False) == 6
    assert await stage.store.join(make_card("died", epoch=1, process=2), rejoin=False) == 6


async def test_a_replaced_process_cannot_take_its_name_back(store: Store) -> None:
    await store.join(make_card(epoch=5, process=1), rejoin=False)
    await store.join(make_card(epoch=6, process=2), rejoin=False)
    assert (await refused(store.join(make_card(epoch=5, process=1), rejoin=True))).reason is Reason.REPLACED
    assert (await store.worker("prefill", 0)).epoch == 6


async def test_a_store_that_forgot_takes_a_rejoin_at_its_old_epoch(store: Store) -> None:
    assert await store.join(make_card(epoch=41), rejoin=True) == 41


async def test_a_worker_that_stops_beating_is_gone(stage: Stage) -> None:
    await stage.store.join(make_card("beats"), rejoin=False)
    await stage.store.join(make_card("stops"), rejoin=False)
    for _ in range(3):
        await stage.pass_time(LEASE_S * 0.6)
        assert await stage.store.beat("beats", 1)
    assert [card.worker_id for card in await stage.store.workers()] == ["beats"]
    assert not await stage.store.beat("stops", 1)
    assert not await stage.store.beat("beats", 2)


async def test_asking_for_a_worker_says_what_is_wrong(store: Store) -> None:
    unknown = await refused(store.worker("prefill", 0))
    assert unknown.reason is Reason.UNKNOWN
    assert "'prefill' is not joined" in unknown.sentence
    await store.join(make_card(epoch=4), rejoin=False)
    restarted = await refused(store.worker("prefill", 3))
    assert restarted.reason is Reason.RESTARTED
    assert restarted.sentence == "worker 'prefill' restarted: the call is for epoch 3, and epoch 4 is running"


async def test_leaving_under_an_old_epoch_changes_nothing(store: Store) -> None:
    await store.join(make_card(epoch=1, process=1), rejoin=False)
    await store.join(make_card(epoch=2, process=2), rejoin=False)
    await store.leave("prefill", 1)
    assert (await store.worker("prefill", 0)).epoch == 2


async def test_a_full_store_refuses_further_workers_but_not_those_it_has(store: Store) -> None:
    for name in "abc":
        await store.join(make_card(name), rejoin=False)
    assert (await refused(store.join(make_card("d"), rejoin=False))).reason is Reason.TOO_MANY
    assert await store.join(make_card("c"), rejoin=True) == 1


async def test_a_watch_starts_with_everyone_and_tells_every_change_in_order(stage: Stage) -> None:
    store = stage.store
    old, new, other = make_card("a", epoch=1, process=1), make_card("a", epoch=2, process=2), make_card("b")
    await store.join(old, rejoin=False)
    with closing(await store.watch()) as feed:
        assert await anext(feed) == [WorkerChange(Joined.UP, old)]
        await store.join(old, rejoin=False)  # nothing new
        await store.join(new, rejoin=False)
        await store.join(other, rejoin=False)
        await store.leave("a", 2)
        await stage.pass_time(2 * LEASE_S)
        seen = [await anext(feed) for _ in range(4)]
    assert seen == [
        [WorkerChange(Joined.DOWN, old), WorkerChange(Joined.UP, new)],
        [WorkerChange(Joined.UP, other)],
        [WorkerChange(Joined.DOWN, new)],
        [WorkerChange(Joined.DOWN, other)],
    ]


async def test_a_worker_that_drains_publishes_that_and_keeps_its_offers(stage: Stage) -> None:
    store, card = stage.store, make_card("a")
    await store.join(card, rejoin=False)
    await store.offer(make_offer("r", worker_id="a"))
    assert (await store.status()).draining == 0
    with closing(await store.watch()) as feed:
        await anext(feed)
        drains = replace(card, draining=True)
        assert await store.join(drains, rejoin=True) == card.epoch
        assert await anext(feed) == [WorkerChange(Joined.UP, drains)]
    assert await store.workers() == [drains]
    assert (await store.status()).draining == 1
    assert await store.claim(Claim("r", 0.0, 0, 1)) == [make_offer("r", worker_id="a").ticket]


async def test_large_cards_are_bounded_together_and_room_is_regained(store: Store) -> None:
    large = replace(make_card("a", epoch=1), region_bytes=(1 << 30,) * 150)
    await store.join(large, rejoin=False)
    assert (await refused(store.join(replace(large, worker_id="b"), rejoin=False))).reason is Reason.TOO_MANY
    assert await store.join(large, rejoin=False) == 1, "its own room"
    assert await store.join(make_card("b"), rejoin=False) == 1
    await store.leave("a", 1)
    await store.join(replace(large, worker_id="c"), rejoin=False)


async def test_a_watch_that_nobody_reads_ends_and_says_why() -> None:
    store = MemoryStore(LEASE_S)  # each change is an item of its own there
    with closing(await store.watch()) as unread, closing(await store.watch()) as read:
        for epoch in range(1, 1_100):
            await store.join(make_card(epoch=epoch, process=epoch % 2 + 1), rejoin=False)
            if epoch % 100 == 0:
                read.drain()
        assert len(unread.drain()) == 1_024
        with pytest.raises(Refused, match="fell behind"):
            await asyncio.wait_for(anext(unread), 10.0)
        assert read.drain()[-1][-1].card.epoch == 1_099
