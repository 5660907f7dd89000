# SPDX-License-Identifier: Apache-2.0
"""An etcd that is full: what coordinators still do, what they say, and that they go on compacting."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest
from aiohttp import ClientSession
from control.cards import make_card, make_offer
from control.fake_etcd import Clock, FakeEtcd

from kvlink.control import Claim, CoordinatorClient
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
