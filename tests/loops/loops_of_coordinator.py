# SPDX-License-Identifier: Apache-2.0
"""The loops of kvlink/coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from control.cards import make_card, make_offer
from control.fake_etcd import FakeEtcd
from coordinator.chains import prefix, query, shown
from loops.rows import FailingOnce, Unexpected, failing, passes, scene

from kvlink.control import Claim, SettleOrder
from kvlink.control.overview import Beat
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.values import PrefixChanges, Push, PushKind, StoreHealth
from kvlink.coordinator import Coordinator
from kvlink.coordinator.prefix_service import PrefixService
from kvlink.coordinator.readiness import Readiness
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore, settle_orders
from kvlink.coordinator.store.etcd.claims import EtcdClaims
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.coordinator.store.etcd.mirror import Mirror
from kvlink.coordinator.store.etcd.settle_orders import SettleOrders
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.types import Joined, WorkerChange

TICKET = make_offer("r").ticket


@asynccontextmanager
async def memory_store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    await store.start()
    await store.join(make_card(), rejoin=False)
    yield store
    await store.close()


@asynccontextmanager
async def etcd_store() -> AsyncIterator[tuple[EtcdStore, FakeEtcd]]:
    etcd = FakeEtcd()
    store = EtcdStore("etcd://127.0.0.1:1/fleet", trust=etcd)
    await store.start()
    await store.join(make_card(), rejoin=False)
    yield store, etcd
    await store.close()


async def hands_off(store: Store, name: str = "r") -> None:
    await store.offer(make_offer(name))
    assert await store.claim(Claim(name, 5.0)) == [make_offer(name).ticket]


@scene("store timer")
async def timers_of_stores() -> None:
    async with memory_store() as memory, etcd_store() as (etcd, _):
        for store in (memory, etcd):
            with failing(store, "tick"):
                with pytest.raises(RefusedError, match="no worker offered it"):
                    await store.claim(Claim("nobody has it", 3.0))
                with pytest.raises(RefusedError, match="no worker offered it"):
                    await store.claim(Claim("nobody has it", 3.0))


@scene("readiness")
async def readiness() -> None:
    report, health = FailingOnce(), [StoreHealth()]

    async def tell(ready: bool) -> None:
        report(ready)

    looking = Readiness(tell, lambda: health[0], lambda: False)
    looking.start()
    await passes()
    health[0] = StoreHealth(is_lost=True)
    await passes()
    health[0] = StoreHealth()
    await passes()
    assert report.calls == [(False,), (True,)]
    await looking.close()


@scene("prefix watch")
async def a_watch_of_prefixes() -> None:
    async with memory_store() as store:
        service = PrefixService(store)
        await store.join(make_card("gone"), rejoin=False)
        with failing(store, "watch"):
            await service.publish(PrefixChanges("gone", 1, (prefix("g"),)))
            await passes(1.0)
        assert shown(await service.find(query("g"))) == [(1, "g")]
        await store.leave("gone", 1)
        await passes(0.1)
        assert shown(await service.find(query("g"))) == []
        await service.close()


@scene("settle orders")
async def orders_to_settle() -> None:
    pushed: list[Push] = []

    async def beats() -> AsyncIterator[Beat]:
        yield Beat("prefill", 1)
        await passes(60.0)

    async def send(push: Push) -> None:
        if push.slot == 1:
            raise Unexpected
        pushed.append(push)

    async with memory_store() as store:
        stream = asyncio.ensure_future(Coordinator(store)._keep_alive(beats(), send))
        await passes(1.0)
        for slot in (1, 2, 3):
            await store.settle(SettleOrder("prefill", 1, slot, 7))
        await passes(1.0)
        assert [push.slot for push in pushed if push.kind is PushKind.SETTLE] == [2, 3]
        await stream


@scene("etcd watch")
async def a_watch_of_etcd() -> None:
    async with etcd_store() as (store, _):
        with failing(Mirror, "apply"):
            await hands_off(store)
        with failing(SettleOrders, "stop"):
            feed = await store.watch()
            assert len(await anext(feed)) == 1
            await store.leave("prefill", 1)
            assert await anext(feed) == [WorkerChange(Joined.DOWN, make_card())]


@scene("etcd pulse")
async def a_pulse_of_etcd() -> None:
    async with etcd_store() as (_, etcd):
        with failing(Sync, "tend"):
            await passes(35.0)
        etcd.calls.clear()
        await passes(35.0)
        assert "Txn" in etcd.calls


@scene("etcd calls")
async def calls_of_etcd() -> None:
    async with etcd_store() as (store, _):
        with failing(EtcdStore, "_note_end"):
            await hands_off(store)
        await hands_off(store, "s")
        await passes(0.1)
        assert len(store._pending) == 1, "the first is not forgotten, and the others are"


@scene("etcd deletions")
async def deletions_in_etcd() -> None:
    async with etcd_store() as (store, etcd):
        await store.offer(make_offer("r", ttl_s=5.0))
        await passes(5.001)
        garbage = store._offers._garbage
        with failing(garbage, "set"):
            etcd.is_away = True
            await passes(10.0)
            etcd.is_away = False
            await passes(10.0)
        await hands_off(store, "s")


@scene("settle deletions")
async def deletions_of_orders() -> None:
    async with etcd_store() as (store, _):
        with failing(settle_orders, "_retrieve"):
            feed = await store.orders("prefill", 1)
            for slot in (1, 2):
                order = SettleOrder("prefill", 1, slot, 7)
                await store.settle(order)
                assert await anext(feed) == order
                await passes(1.0)


@scene("group commit")
async def a_group_commit() -> None:
    async with etcd_store() as (store, _):
        with failing(GroupCommit, "_send"):
            first = store.offer(make_offer("r"))
            await passes(1.0)
            assert not first.done()
            await hands_off(store, "s")
        await first


async def first_fails(store: EtcdStore, call: Callable[[str], Any]) -> None:
    with pytest.raises(RefusedError) as refused:
        await call("r")
    assert refused.value.reason is Reason.FAILED
    await hands_off(store, "s")


@scene("commit")
async def a_commit() -> None:
    async with etcd_store() as (store, _):
        with failing(store._etcd, "commit"):
            await first_fails(store, lambda name: store.offer(make_offer(name)))
        with failing(GroupCommit, "_batch"):
            store.offer(make_offer("t"))
            await passes(1.0)
            await hands_off(store, "u")


@scene("commit ended")
async def the_end_of_a_commit() -> None:
    async with etcd_store() as (store, _):
        with failing(GroupCommit, "_sent", times=9):
            for number in range(9):
                await hands_off(store, f"r{number}")
        await hands_off(store)


@scene("claims")
async def claims() -> None:
    async with etcd_store() as (store, _):
        await store.offer(make_offer("r"))
        with failing(EtcdClaims, "_give"):
            await first_fails(store, lambda name: store.claim(Claim(name, 5.0)))
        assert await store.claim(Claim("r", 5.0)) == [TICKET]


@scene("claim at once")
async def a_claim_that_does_not_wait() -> None:
    async with etcd_store() as (store, _):
        await store.offer(make_offer("r"))
        with failing(EtcdClaims, "_catch_up"):
            await first_fails(store, lambda name: store.claim(Claim(name, 0.0)))
        assert await store.claim(Claim("r", 0.0)) == [TICKET]


@scene("claim ended")
async def the_end_of_a_claim() -> None:
    async with etcd_store() as (store, _):
        with failing(EtcdClaims, "_end"):
            await hands_off(store)
        await hands_off(store, "s")
        await passes()


@scene("lease renewals")
async def renewals_of_leases() -> None:
    async with etcd_store() as (store, _):
        with failing(store._etcd, "keep_alive", times=3), pytest.raises(RefusedError):
            await store.beat("prefill", 1)
        assert await store.beat("prefill", 1)
