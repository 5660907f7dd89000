# SPDX-License-Identifier: Apache-2.0
"""Settle orders, what closing ends, and what status counts."""

from __future__ import annotations

from contextlib import closing

from control.cards import make_card, make_offer
from control.store.stages import LEASE_S, Stage, refused, started

from kvlink.control.refusal import Reason
from kvlink.control.values import Claim, SettleOrder


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
    status = await joined.store.status()
    assert (status.workers, status.tickets, status.offered, status.claimed, status.expired) == (1, 1, 3, 1, 1)
    assert (status.joined, status.settle_orders, status.lost_workers) == (1, 1, 0)
    await joined.pass_time(2 * LEASE_S)
    assert (await joined.store.status()).lost_workers == 1
