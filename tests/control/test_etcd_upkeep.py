# SPDX-License-Identifier: Apache-2.0
"""An etcd that is full: what coordinators still do, what they say, and that they go on compacting."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from pathlib import Path

import pytest
from aiohttp import ClientSession
from control.cards import make_card, make_offer
from control.fake_etcd import Clock, FakeEtcd
from waiting import until

from kvlink.control import Claim, CoordinatorClient, Limits
from kvlink.control.refusal import Overloaded, Reason, RefusedError
from kvlink.control.values import StoreHealth
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.etcd.api import delete, put
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.monitoring.status_page.serving import serve_status_page
from kvlink.v1 import etcd_pb2 as pb


async def refused(store: EtcdStore, name: str) -> RefusedError:
    with pytest.raises(RefusedError) as refused:
        await store.offer(make_offer(name))
    return refused.value


async def test_offers_are_refused_as_retryable_and_the_log_stays_short(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fake_etcd.is_full = True
    for number in range(50):
        why = await refused(store, f"r{number}")
        assert why.reason is Reason.TOO_MANY
    assert "store is full" in why.sentence
    assert "operator's guide" in why.sentence
    clock.now += 60.0
    await refused(store, "later")
    output = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [line.partition(" error=")[0] for line in output] == [
        "etcd is full, see the operator's guide suppressed=0",
        "etcd is full, see the operator's guide suppressed=49",
    ]


async def test_whatever_needs_room_is_refused_and_the_rest_goes_on(
    store: EtcdStore, fake_etcd: FakeEtcd
) -> None:
    await store.offer(make_offer("r"))
    fake_etcd.is_full = True
    with pytest.raises(RefusedError) as claimed:
        await store.claim(Claim("r", 30.0))
    with pytest.raises(RefusedError) as joined:
        await store.join(make_card("another"), rejoin=False)
    assert {claimed.value.reason, joined.value.reason} == {Reason.TOO_MANY}
    assert await store.beat("prefill", 1)
    assert [card.worker_id for card in await store.workers()] == ["prefill"]
    fake_etcd.is_full = False
    assert await store.claim(Claim("r", 30.0)) == [make_offer("r").ticket]


async def test_health_follows(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    assert store.health() == StoreHealth()
    fake_etcd.is_full = True
    await refused(store, "r")
    assert store.health() == StoreHealth(is_full=True)
    assert not store.health().is_healthy
    fake_etcd.is_full = False
    await store._sync.tend()
    assert store.health().is_healthy


async def test_a_full_etcd_is_compacted_all_the_same(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    await store._sync.tend()
    fake_etcd.is_full = True
    clock.now += 121.0
    revision = fake_etcd.data.revision
    await store._sync.tend()
    assert fake_etcd.data.compacted == revision
    fake_etcd.put((b"/another", b""))
    clock.now += 121.0
    await store._sync.tend()
    assert fake_etcd.data.compacted == revision, "what it was 121 s ago"
    clock.now += 121.0
    await store._sync.tend()
    assert fake_etcd.data.compacted == revision + 1


async def test_what_is_older_than_two_minutes_is_compacted_once_a_minute(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    revisions = []
    for number in range(3):
        await store._sync.tend()
        revisions.append(fake_etcd.data.revision)
        fake_etcd.put((b"/another", b"%d" % number))
        clock.now += 60.5
    compacted = []
    fake_etcd.calls.clear()
    for seconds in (0.0, 30.0, 31.0):
        clock.now += seconds
        await store._sync.tend()
        compacted.append(fake_etcd.data.compacted)
    assert compacted == [revisions[1], revisions[1], revisions[2]]
    assert fake_etcd.calls.count("Compact") == 2


async def test_deletions_of_a_batch_are_carried_out(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    fake_etcd.put((b"/old/1", b""), (b"/old/2", b""))
    fake_etcd.is_full = True
    commits = GroupCommit(store._etcd, store._sync.written)
    ops = {b"/old/1": delete, b"/new": lambda key: put(key, b""), b"/old/2": delete}
    done = [commits.submit(pb.TxnRequest(success=[make(key)]), key) for key, make in ops.items()]
    results = await asyncio.gather(*done, return_exceptions=True)
    assert [isinstance(result, Exception) for result in results] == [False, True, False]
    assert not fake_etcd.data.kvs.keys() & ops.keys()
    await commits.close()


def tickets_in(fake_etcd: FakeEtcd) -> int:
    return sum(b"/tickets/" in key for key in fake_etcd.data.kvs)


@pytest.fixture
def deleted_after_1_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.coordinator.store.etcd.offers.random.uniform", lambda least, most: most / 2)


@pytest.mark.usefixtures("deleted_after_1_s")
async def test_an_expired_ticket_is_deleted_a_little_later(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock
) -> None:
    await store.offer(make_offer("r", ttl_s=5.0))
    clock.now += 5.0
    store.tick()
    await asyncio.gather(*store._commits._running)
    assert tickets_in(fake_etcd) == 1, "another coordinator may delete it first"
    clock.now += 1.0
    store.tick()
    await until(lambda: not tickets_in(fake_etcd))
    fake_etcd.calls.clear()
    clock.now += 60.0
    store.tick()
    await store.offer(make_offer("s"))
    assert fake_etcd.calls.count("Txn") == 1, "it is not deleted again"


@pytest.mark.usefixtures("deleted_after_1_s")
async def test_a_deletion_that_failed_is_tried_again(
    store: EtcdStore, fake_etcd: FakeEtcd, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store._etcd, "_patience_s", 0.0)
    await store.offer(make_offer("r", ttl_s=5.0))
    clock.now += 5.0
    store.tick()
    fake_etcd.is_away = True
    clock.now += 1.0
    store.tick()
    await until(lambda: store._offers.next_deadline() < math.inf)
    fake_etcd.is_away = False
    clock.now += 20.0
    store.tick()
    await until(lambda: not tickets_in(fake_etcd))


async def test_a_ticket_that_is_there_is_not_written_again(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    await store.offer(make_offer("r"))
    fake_etcd.calls.clear()
    await store.offer(make_offer("r"))
    assert fake_etcd.calls == []


async def test_writes_of_one_key_go_one_after_the_other(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    commits = GroupCommit(store._etcd, store._sync.written)
    keys = (b"/a", b"/b", b"/a", b"/a", b"/b")
    done = [
        commits.submit(pb.TxnRequest(success=[put(key, b"%d" % number)]), key)
        for number, key in enumerate(keys)
    ]
    assert all(each.succeeded for each in await asyncio.gather(*done))
    assert [fake_etcd.data.kvs[key].value for key in (b"/a", b"/b")] == [b"3", b"4"]
    await commits.close()


async def test_epochs_of_who_is_gone_are_deleted_oldest_first(
    fake_etcd: FakeEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlink.coordinator.store.etcd.membership._PRUNE_AT_ONCE", 1)
    store = EtcdStore("etcd://127.0.0.1:1/fleet", limits=Limits(remembered_epochs=2), trust=fake_etcd)
    await store.start()
    for name in "abcd":
        await store.join(make_card(name), rejoin=False)
    for name in "abc":
        await store.leave(name, 1)
    await store.join(make_card("e"), rejoin=False)
    await until(lambda: store._mirror.incarnations.keys() == {"b", "c", "d", "e"})
    await store.close()


async def test_the_charts_probes_ask_for_what_there_is() -> None:
    chart = Path(__file__).parents[2] / "integrations" / "deploy" / "chart" / "templates" / "statefulset.yaml"
    paths = re.findall(r"httpGet: {path: (\S+), port: http}", chart.read_text())
    assert sorted(paths) == ["/metrics", "/ready"]
    coordinator = Coordinator()
    await coordinator.start()
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url, ClientSession(url) as session:
        for path in paths:
            assert (await session.get(path)).status == 200
    await coordinator.close()


async def test_callers_see_a_limit_and_the_page_says_why(store: EtcdStore, fake_etcd: FakeEtcd) -> None:
    coordinator = Coordinator(store)
    address = await coordinator.start()
    fake_etcd.is_full = True
    async with (
        CoordinatorClient(address) as client,
        serve_status_page(coordinator, "127.0.0.1", 0) as url,
        ClientSession(url) as session,
    ):
        with pytest.raises(Overloaded, match="store is full") as full:
            await client.offer(make_offer("r"))
        assert full.value.retryable
        assert "kvlink_coordinator_store_healthy 0.0" in await (await session.get("/metrics")).text()
        assert (await session.get("/ready")).status == 200, "it is full for the other replicas, too"
        fake_etcd.is_full = False
        await client.offer(make_offer("r"))
        assert "kvlink_coordinator_store_healthy 1.0" in await (await session.get("/metrics")).text()
        await coordinator.drain()
        answer = await session.get("/ready")
        assert (answer.status, await answer.text()) == (503, "shutting down\n")
    await coordinator.close()
