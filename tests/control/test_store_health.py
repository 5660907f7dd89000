# SPDX-License-Identifier: Apache-2.0
"""A coordinator that has lost its store sends its callers away instead of letting them wait there."""

from __future__ import annotations

import asyncio
import math

import pytest
from aiohttp import ClientSession
from control.cards import make_card, make_offer
from control.fake_etcd import Clock, FakeEtcd
from grpc_health.v1 import health_pb2
from waiting import until

from kvlink.control import Claim, CoordinatorClient
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.security import Security
from kvlink.control.values import StoreHealth
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.etcd.api import LOST_S, Health
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import TenantStores
from kvlink.errors import CoordinatorUnavailable
from kvlink.monitoring.status_page.serving import serve_status_page

NEVER_S = 1e6


@pytest.fixture(autouse=True)
def etcd_gets_one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.coordinator.store.etcd.api._PATIENCE_S", 0.0)
    monkeypatch.setattr("kvlink.coordinator.store.etcd.api._PATIENCE_WHEN_AWAY_S", 0.0)
    monkeypatch.setattr("kvlink.coordinator.store.etcd.sync._STALE_S", 0.0)


async def lose(store: EtcdStore, clock: Clock) -> None:
    """After etcd has been made to fail."""
    await store._sync.tend()
    clock.now += LOST_S
    store.tick()


def test_a_doubt_that_is_not_proved_wrong_in_time_is_said_once() -> None:
    clock = Clock()
    health = Health(clock)
    doubts: list[float] = []
    health.on_doubt = lambda: doubts.append(health.next_deadline())
    health.doubt()
    clock.now += 2.0
    health.doubt()
    assert doubts == [1_000.0 + LOST_S], "the oldest doubt counts"
    assert health.report() == StoreHealth(stale_s=2.0)
    assert not health.expire()
    clock.now += LOST_S
    assert [health.expire(), health.expire()] == [True, False]
    assert health.report() == StoreHealth(is_lost=True, stale_s=2.0 + LOST_S)
    assert health.next_deadline() == math.inf
    health.proved()
    assert health.report() == StoreHealth()
    clock.now += 100.0
    assert not health.expire()


@pytest.mark.parametrize("how", ["away", "mute"])
async def test_claims_and_watches_are_sent_elsewhere(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock, how: str
) -> None:
    await store.offer(make_offer("had"))
    had = Claim("had", NEVER_S, claim_id=b"id")
    assert await store.claim(had) == [make_offer("had").ticket]
    waiting = [store.claim(Claim(name, NEVER_S)) for name in ("r", "s")]
    feed = await store.watch()
    await anext(feed)
    if how == "away":
        fake_etcd.go_away()
    else:
        fake_etcd.is_mute = True
    await store._sync.tend()
    clock.now += 0.9 * LOST_S
    store.tick()
    assert not any(each.done() for each in waiting), "as in an election"
    clock.now += 0.1 * LOST_S
    store.tick()
    for call in (*waiting, anext(feed), store.claim(had), store.claim(Claim("t", NEVER_S)), store.watch()):
        with pytest.raises(
            RefusedError, match=r"has lost its store, etcd at 127\.0\.0\.1:1, .* at another coordinator"
        ) as gone:
            await call
        assert gone.value.reason is Reason.NOT_READY
    assert [card.worker_id for card in await store.workers()] == ["prefill"], (
        "who is known may be pulled from"
    )

    fake_etcd.is_away = fake_etcd.is_mute = False
    if how == "mute":
        store._sync._following_since = -math.inf
        store._sync._restart()
    await until(lambda: _proved(store))
    await store.offer(make_offer("r"))
    assert await store.claim(Claim("r", NEVER_S)) == [make_offer("r").ticket]


async def test_an_offer_that_came_back_is_a_proof(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    fake_etcd.is_away = True
    await lose(store, clock)
    fake_etcd.is_away = False
    await store.offer(make_offer("r"))
    assert store.health() == StoreHealth()
    assert await store.claim(Claim("r", NEVER_S)) == [make_offer("r").ticket]


async def _proved(store: EtcdStore) -> bool:
    await store._sync.tend()
    return store.health() == StoreHealth()


async def test_the_gauge_counts_from_the_first_doubt(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    clock.now += 10.0
    store.tick()
    assert store.health() == StoreHealth()
    fake_etcd.is_away = True
    with pytest.raises(RefusedError):
        await store.beat("prefill", 1)
    assert store._next_deadline() == clock.now + LOST_S, "whoever waits is sent away without being asked"
    assert store._alarm.due <= clock.now + LOST_S
    clock.now += 2.0
    await store._sync.tend()
    assert store.health() == StoreHealth(stale_s=2.0), "a beat in vain is a doubt"


async def test_one_that_never_read_its_store_is_lost_too(fake_etcd: FakeEtcd, clock: Clock) -> None:
    fake_etcd.is_away = True
    store = EtcdStore("etcd://127.0.0.1:1/fleet", clock=clock, trust=fake_etcd)
    store._sync.start()
    waiting = store.claim(Claim("r", NEVER_S))
    clock.now += LOST_S
    store.tick()
    with pytest.raises(RefusedError, match="has lost its store"):
        await waiting
    await store.close()


async def test_a_full_store_that_answers_is_not_lost(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    fake_etcd.is_full = True
    await store._sync.tend()
    clock.now += 2.0
    assert store.health() == StoreHealth(is_full=True)


async def test_a_watch_that_ended_is_doubted_until_a_write_comes_through(
    fake_etcd: FakeEtcd, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlink.coordinator.store.etcd.sync._PULSE_S", 0.001)
    store = EtcdStore("etcd://127.0.0.1:1/fleet", clock=clock, trust=fake_etcd)
    await store.start()
    doubts: list[StoreHealth] = []
    store._etcd.health.on_doubt = lambda: doubts.append(store.health())
    fake_etcd.is_mute = True
    fake_etcd.cut()
    await until(lambda: doubts)
    fake_etcd.calls.clear()
    await until(lambda: "Txn" in fake_etcd.calls)
    assert store._etcd.health.is_doubted
    fake_etcd.is_mute = False
    await until(lambda: not store._etcd.health.is_doubted)
    await store.close()


async def test_of_tenants_the_worst_is_told(store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock) -> None:
    async def opened(each: EtcdStore | MemoryStore) -> EtcdStore | MemoryStore:
        return each

    tenants = TenantStores(lambda tenant: store)
    assert tenants.health() == StoreHealth()
    for name, each in (("a", store), ("b", MemoryStore())):
        tenants._stores[name] = asyncio.ensure_future(opened(each))  # type: ignore[assignment]
        await tenants._stores[name]
    fake_etcd.go_away()
    await lose(store, clock)
    assert tenants.health() == StoreHealth(is_lost=True, stale_s=LOST_S)


async def test_health_checks_see_it(store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock) -> None:
    coordinator = Coordinator(store)
    address = await coordinator.start()
    trust = Security.from_env().coordinators()
    channel = trust.dial(address, [])

    async def serves() -> bool:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        blob = await check(health_pb2.HealthCheckRequest(service="kvlink.v1.Coordinator").SerializeToString())
        return (
            health_pb2.HealthCheckResponse.FromString(blob).status == health_pb2.HealthCheckResponse.SERVING
        )

    async with serve_status_page(coordinator, "127.0.0.1", 0) as url, ClientSession(url) as session:
        assert await serves()
        fake_etcd.go_away()
        await lose(store, clock)
        await coordinator.readiness.poll()
        assert not await serves()
        ready = await session.get("/ready")
        assert (ready.status, await ready.text()) == (503, "the store has not answered for 3 s\n")
        metrics = await (await session.get("/metrics")).text()
        assert "kvlink_coordinator_store_healthy 0.0" in metrics
        assert "kvlink_coordinator_store_stale_seconds 3.0" in metrics
        fake_etcd.is_away = False
        await until(lambda: _proved(store))
        await until(serves)  # without being told to look
    await channel.close()
    await coordinator.close()


async def test_a_claim_in_vain_is_asked_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.control.client._CLAIM_TURN_S", 0.01)
    coordinators = [Coordinator(), Coordinator()]
    addresses = [await each.start() for each in coordinators]
    async with CoordinatorClient(",".join(addresses)) as client:
        asked = client.next_address
        (other,) = [address for address in addresses if address != asked]
        async with CoordinatorClient(other) as worker:
            await worker.join(make_card())
            await worker.offer(make_offer("r"))
        assert await client.claim("r", timeout_s=NEVER_S) == [make_offer("r").ticket]
        assert client.next_address == other
    for each in coordinators:
        await each.close()


async def test_a_claim_at_one_that_has_lost_its_store_goes_to_another(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    lost, healthy = Coordinator(store), Coordinator()
    addresses = [await each.start() for each in (lost, healthy)]
    fake_etcd.go_away()
    await lose(store, clock)
    async with CoordinatorClient(addresses[0]) as only:
        with pytest.raises(CoordinatorUnavailable, match="has lost its store"):
            await only.claim("r", timeout_s=0.0)
    async with CoordinatorClient(",".join(addresses)) as client, CoordinatorClient(addresses[1]) as worker:
        await worker.join(make_card())
        await worker.offer(make_offer("r"))
        client._channel._servers.sort(key=lambda server: server.address != addresses[0])
        assert client.next_address == addresses[0]
        assert await client.claim("r", timeout_s=NEVER_S) == [make_offer("r").ticket]
    for each in (lost, healthy):
        await each.close()
