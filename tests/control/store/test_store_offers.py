# SPDX-License-Identifier: Apache-2.0
"""Every store treats offers, workers and settle orders alike."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest
from control.cards import make_card, make_offer
from control.store.stages import LEASE_S, Stage, gone, refused, started

from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.values import Claim, SettleOrder
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.types import Joined, WorkerChange


async def test_a_published_ticket_is_claimed_once(joined: Stage) -> None:
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r")) == [make_offer("r").ticket]
    second = await started(joined.store.claim(Claim("r", 1.0)))
    await joined.pass_time(1.0)
    assert (await refused(second)).reason is Reason.UNKNOWN


async def test_a_claim_waits_for_its_offer(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    await joined.store.offer(make_offer("other"))
    await started(claim)
    await joined.store.offer(make_offer("r"))
    assert await claim == [make_offer("r").ticket]
    await asyncio.sleep(0)  # a claim may leave the queue a turn of the loop after its answer
    assert (await joined.store.status()).waiting_claims == 0


async def test_the_hook_of_a_claim_hears_of_tickets_and_of_refusals(joined: Stage) -> None:
    claims = [joined.store.claim(Claim(name, 2.0)) for name in ("r", "none")]
    heard: list[object] = []
    for claim in claims:
        claim.on_answer = heard.append
    await joined.store.offer(make_offer("r"))
    assert await claims[0] == [make_offer("r").ticket]
    assert heard == claims[:1]
    await joined.pass_time(2.0)
    await refused(claims[1])
    assert heard == claims


async def test_a_claim_waits_for_every_rank_and_gets_them_in_order(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    for rank in (2, 0):
        await joined.store.offer(make_offer("r", rank=rank, of=3))
    assert await gone(joined.store, Claim("r"))
    await started(claim)
    await joined.store.offer(make_offer("r", rank=1, of=3))
    assert await claim == [make_offer("r", rank=rank, of=3).ticket for rank in range(3)]


async def test_a_claim_in_vain_says_how_far_it_got(joined: Stage) -> None:
    none = await started(joined.store.claim(Claim("none", 2.0)))
    some = await started(joined.store.claim(Claim("some", 2.0)))
    await joined.store.offer(make_offer("some", rank=0, of=2))
    await joined.pass_time(2.0)
    assert "'none': no worker offered it" in (await refused(none)).sentence
    assert "'some': only 1 of 2 ranks offered it within 2 s" in (await refused(some)).sentence


async def test_every_reader_may_claim_until_all_have(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", seats=2))
    for reader in (0, 0, 1):  # reader 0 asks again, as after a lost reply
        assert await joined.store.claim(Claim("r", 0.0, reader, 2))
    assert await gone(joined.store, Claim("r", 0.0, 0, 2))


async def test_a_claim_asked_again_under_its_id_gets_the_same_tickets(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", seats=2))
    claims = [Claim("r", 0.0, reader, 2, bytes([reader])) for reader in range(2)]
    for claim in (claims[0], claims[0], claims[1], claims[1], claims[0]):
        assert await joined.store.claim(claim) == [make_offer("r").ticket]
    assert await gone(joined.store, claims[0]._replace(claim_id=b"another"))
    assert await gone(joined.store, claims[0]._replace(claim_id=b""))


async def test_a_ticket_that_was_claimed_is_not_published_again(joined: Stage) -> None:
    await joined.store.offer(make_offer("r"))
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r"))
    await joined.store.offer(make_offer("r"))  # as a worker does that joined again
    assert await gone(joined.store, Claim("r"))
    assert (await joined.store.status()).tickets == 0
    other = make_offer("r")._replace(ticket=b"of another prefill")
    await joined.store.offer(other)
    assert await joined.store.claim(Claim("r")) == [other.ticket]


async def test_tickets_of_two_prefills_are_not_mixed(joined: Stage) -> None:
    first = [make_offer("r", rank=rank, of=2) for rank in range(2)]
    second = [offer._replace(ticket=b"second " + offer.ticket) for offer in first]
    for offer in first:
        await joined.store.offer(offer)
    assert await joined.store.claim(Claim("r"))
    await joined.store.offer(second[0])
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    await joined.store.offer(second[1])
    assert await claim == [offer.ticket for offer in second]


@pytest.mark.parametrize(("seats", "readers"), [(1, 3), (3, 1)])
async def test_neither_seats_nor_readers_alone_end_a_request(joined: Stage, seats: int, readers: int) -> None:
    await joined.store.offer(make_offer("r", seats=seats))
    num_readers = max(seats, readers)
    for reader in range(num_readers):
        assert await joined.store.claim(Claim("r", 0.0, reader, num_readers))
    assert (await joined.store.status()).tickets == 0


async def test_waiting_readers_are_all_answered(joined: Stage) -> None:
    claims = [await started(joined.store.claim(Claim("r", 5.0, reader, 2))) for reader in range(2)]
    await joined.store.offer(make_offer("r", seats=2))
    assert await asyncio.gather(*claims) == [[make_offer("r").ticket]] * 2


async def test_a_cancelled_claim_takes_no_ticket(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    claim.cancel()
    await asyncio.sleep(0)
    assert (await joined.store.status()).waiting_claims == 0
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r"))


async def test_an_offer_runs_out_and_later_claims_hear_it_at_once(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", ttl_s=3.0))
    await joined.pass_time(2.9)
    assert (await joined.store.status()).tickets == 1
    await joined.pass_time(0.1)
    expired = await refused(joined.store.claim(Claim("r", 60.0)))
    assert expired.reason is Reason.EXPIRED
    assert "not claimed within 3 s" in expired.sentence
    assert (await joined.store.status()).tickets == 0
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r")), "offering again counts"


async def test_offering_again_replaces_the_ticket_and_its_time_to_live(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", ttl_s=1.0))
    await joined.store.offer(make_offer("r", ttl_s=3.0)._replace(ticket=b"newer"))
    await joined.pass_time(2.0)
    assert await joined.store.claim(Claim("r")) == [b"newer"]


async def test_ranks_that_disagree_are_refused(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", rank=0, of=2))
    disagrees = await refused(joined.store.offer(make_offer("r", rank=1, of=4)))
    assert disagrees.reason is Reason.MALFORMED
    assert "rank 1 offered with 4 ranks, and other ranks with 2" in disagrees.sentence


async def test_only_the_running_life_of_a_worker_offers(joined: Stage) -> None:
    unknown = await refused(joined.store.offer(make_offer("r", worker_id="nobody")))
    assert unknown.reason is Reason.NOT_JOINED
    await joined.store.join(make_card("prefill", epoch=9, process=2), rejoin=False)
    assert (await refused(joined.store.offer(make_offer("r", epoch=1)))).reason is Reason.RESTARTED


@pytest.mark.parametrize("how", ["restarts", "leaves", "dies"])
async def test_what_a_worker_offered_goes_with_it(joined: Stage, how: str) -> None:
    await joined.store.offer(make_offer("r", ttl_s=600.0))
    if how == "restarts":
        await joined.store.join(make_card("prefill", process=2), rejoin=False)
    elif how == "leaves":
        await joined.store.leave("prefill", 1)
    else:
        await joined.pass_time(2 * LEASE_S)
    gone = await refused(joined.store.claim(Claim("r", 60.0)))
    assert gone.reason is Reason.UNKNOWN
    assert "recompute" in gone.sentence
    assert (await joined.store.status()).tickets == 0


async def test_too_many_tickets_and_claims_are_refused_and_room_is_regained(joined: Stage) -> None:
    for number in range(4):
        await joined.store.offer(make_offer(f"r{number}"))
    assert (await refused(joined.store.offer(make_offer("r4")))).reason is Reason.TOO_MANY
    await joined.store.offer(make_offer("r3"))  # replaces its own
    assert await joined.store.claim(Claim("r0"))
    await joined.store.offer(make_offer("r4"))

    claims = [await started(joined.store.claim(Claim(name, 5.0))) for name in "ab"]
    assert (await refused(joined.store.claim(Claim("c", 5.0)))).reason is Reason.TOO_MANY
    claims[0].cancel()
    await asyncio.sleep(0)
    await started(joined.store.claim(Claim("c", 5.0)))


async def test_tickets_of_all_workers_are_bounded_together(joined: Stage) -> None:
    await joined.store.join(make_card("another"), rejoin=False)
    for number in range(6):
        await joined.store.offer(make_offer(f"r{number}", "prefill" if number < 3 else "another"))
    late = make_offer("late")
    assert "6 unclaimed tickets" in (await refused(joined.store.offer(late))).sentence
    await joined.store.claim(Claim("r0", 5.0))
    await joined.store.offer(late)


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


async def test_a_worker_that_joins_again_takes_the_orders_that_waited(joined: Stage) -> None:
    order = SettleOrder("prefill", 1, 7, 70)
    with closing(await joined.store.orders("prefill", 1)):
        pass
    await joined.store.settle(order)
    await joined.store.join(make_card("prefill"), rejoin=True)
    with closing(await joined.store.orders("prefill", 1)) as orders:
        assert await asyncio.wait_for(anext(orders), 10.0) == order


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


async def test_settle_orders_reach_their_worker_even_if_it_listens_later(joined: Stage) -> None:
    first, second = SettleOrder("prefill", 1, 7, 70), SettleOrder("prefill", 1, 8, 80)
    await joined.store.settle(first)
    with closing(await joined.store.orders("prefill", 1)) as orders:
        await joined.store.settle(second)
        assert [await anext(orders), await anext(orders)] == [first, second]


async def test_a_new_listener_ends_the_old_one_and_takes_what_it_left(joined: Stage) -> None:
    order = SettleOrder("prefill", 1, 7, 70)
    old = await joined.store.orders("prefill", 1)
    await joined.store.settle(order)
    with closing(await joined.store.orders("prefill", 1)) as new:
        assert [order async for order in old] == []
        assert await anext(new) == order


async def test_settle_orders_are_bounded_and_go_to_no_other_life(joined: Stage) -> None:
    order = SettleOrder("prefill", 1, 7, 70)
    await joined.store.settle(order)
    await joined.store.settle(order)
    assert (await refused(joined.store.settle(order))).reason is Reason.TOO_MANY
    await joined.store.join(make_card("prefill", process=2), rejoin=False)
    assert (await refused(joined.store.settle(order))).reason is Reason.RESTARTED
    with closing(await joined.store.orders("prefill", 2)) as orders:
        await joined.store.settle(order._replace(epoch=2))
        assert (await anext(orders)).epoch == 2


async def test_closing_refuses_who_waits_and_ends_every_feed(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    watch, orders = await joined.store.watch(), await joined.store.orders("prefill", 1)
    await anext(watch)
    await joined.store.close()
    await joined.store.close()
    assert (await refused(claim)).reason is Reason.NOT_READY
    assert [changes async for changes in watch] == []
    assert [order async for order in orders] == []


async def test_status_counts_what_happened(joined: Stage) -> None:
    await joined.store.offer(make_offer("claimed"))
    await joined.store.claim(Claim("claimed"))
    await joined.store.offer(make_offer("expired", ttl_s=1.0))
    await joined.pass_time(1.0)
    await joined.store.offer(make_offer("there", ttl_s=99.0))
    await joined.store.settle(SettleOrder("prefill", 1, 7, 70))
    await refused(joined.store.join(make_card("prefill", process=2), rejoin=True))
    await refused(joined.store.offer(make_offer("there", rank=1, of=2)))
    await refused(joined.store.settle(SettleOrder("nobody", 1, 7, 70)))
    status = await joined.store.status()
    assert (status.workers, status.tickets, status.offered, status.claimed, status.expired) == (1, 1, 3, 1, 1)
    assert (status.joined, status.settle_orders, status.lost_workers) == (1, 1, 0)
    await joined.pass_time(2 * LEASE_S)
    assert (await joined.store.status()).lost_workers == 1


async def test_a_watch_that_nobody_reads_ends_and_says_why() -> None:
    store = MemoryStore(LEASE_S)  # each change is an item of its own there
    with closing(await store.watch()) as unread, closing(await store.watch()) as read:
        for epoch in range(1, 1_100):
            await store.join(make_card(epoch=epoch, process=epoch % 2 + 1), rejoin=False)
            if epoch % 100 == 0:
                read.drain()
        assert len(unread.drain()) == 1_024
        with pytest.raises(RefusedError, match="fell behind"):
            await asyncio.wait_for(anext(unread), 10.0)
        assert read.drain()[-1][-1].card.epoch == 1_099
