# SPDX-License-Identifier: Apache-2.0
"""The store on etcd handles batches, its history and its limits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from types import SimpleNamespace

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster, give_etcd_time, start_etcd

from kvlink.control import Claim, SettleOrder
from kvlink.control.limits import Limits
from kvlink.control.refusal import Reason, RefusedError
from kvlink.coordinator import serve
from kvlink.coordinator.store.etcd import EtcdStore, membership
from kvlink.coordinator.store.etcd.api import Etcd, put, unchanged
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable
from kvlink.v1 import etcd_pb2 as pb


@pytest.fixture(autouse=True)
def cluster_has_time(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none of it is to fall silent."""
    if "cluster" in request.fixturenames:
        give_etcd_time(monkeypatch)


@pytest.fixture(scope="module")
def cluster() -> Iterator[EtcdCluster]:
    cluster = start_etcd()
    yield cluster
    cluster.close()


@pytest.fixture
async def etcd(cluster: EtcdCluster) -> AsyncIterator[Etcd]:
    etcd = Etcd(cluster.addresses)
    yield etcd
    await etcd.close()


@pytest.fixture
async def store(cluster: EtcdCluster, request: pytest.FixtureRequest) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(f"etcd://{cluster.addresses}/{request.node.name}")
    await store.start()
    yield store
    await store.close()


async def count_up(commits: GroupCommit, etcd: Etcd, key: bytes) -> None:
    """Adds one by compare-and-set, however often others are first."""
    while True:
        kvs = (await etcd.read(key)).kvs
        value, revision = (int(kvs[0].value), kvs[0].mod_revision) if kvs else (0, 0)
        txn = pb.TxnRequest(compare=[unchanged(key, revision)], success=[put(key, b"%d" % (value + 1))])
        if (await commits.submit(txn, key)).succeeded:
            return


async def no_mirror(revision: int) -> None:
    pass


async def test_batches_lose_no_update(etcd: Etcd) -> None:
    commits = [GroupCommit(etcd, no_mirror), GroupCommit(etcd, no_mirror)]
    await asyncio.gather(*(count_up(commits[n % 2], etcd, b"/count/%d" % (n % 7)) for n in range(140)))
    counts = [int(kv.value) for kv in (await etcd.read(b"/count/", b"/count0")).kvs]
    assert counts == [20] * 7
    for each in commits:
        await each.close()


async def test_one_bad_transaction_does_not_harm_its_batch(etcd: Etcd) -> None:
    commits = GroupCommit(etcd, no_mirror)
    good = [commits.submit(pb.TxnRequest(success=[put(b"/good/%d" % n, b"")]), b"%d" % n) for n in range(100)]
    bad = commits.submit(pb.TxnRequest(success=[put(b"/bad", b"", lease=12345)]), b"/bad")
    assert all(done.succeeded for done in await asyncio.gather(*good))
    with pytest.raises(CoordinatorError, match="requested lease not found"):
        await bad
    await commits.close()


async def test_a_listing_takes_several_pages(etcd: Etcd) -> None:
    for start in range(0, 2_500, 100):
        ops = [put(b"/pages/%05d" % number, b"x") for number in range(start, start + 100)]
        await etcd.commit(pb.TxnRequest(success=ops))
    _, kvs = await etcd.load(b"/pages/")
    assert [kv.key for kv in kvs] == [b"/pages/%05d" % number for number in range(2_500)]


async def test_a_coordinator_catches_up_with_a_history_that_is_gone(
    store: EtcdStore, etcd: Etcd, caplog: pytest.LogCaptureFixture
) -> None:
    await store.join(make_card(), rejoin=False)
    await store.offer(make_offer("old"))
    seen = store._sync._revision
    await store.claim(Claim("old"))
    await store.offer(make_offer("new"))
    await etcd.compact(store._sync._revision)
    store._sync._revision = seen - 1  # as if it had been away all the while
    store._sync._following_since = -math.inf  # nobody has just done so
    store._sync._restart()
    await store.offer(make_offer("newer"))
    for name in ("new", "newer"):
        assert await store.claim(Claim(name, 20.0)) == [make_offer(name).ticket]
    with pytest.raises(RefusedError) as gone:
        await store.claim(Claim("old"))
    assert gone.value.reason is Reason.UNKNOWN
    assert "etcd has compacted changes that this coordinator lacks" in caplog.text


async def test_what_etcd_does_not_take_is_said(store: EtcdStore) -> None:
    await store.join(make_card(), rejoin=False)
    large = make_offer("large")._replace(ticket=bytes(2 << 20))
    with pytest.raises(RefusedError, match=r"too large|larger than max"):
        await store.offer(large)
    await store.offer(make_offer("r"))
    assert await store.claim(Claim("r", 20.0))


async def test_tickets_are_deleted_when_their_time_is_over(
    cluster: EtcdCluster, etcd: Etcd, request: pytest.FixtureRequest
) -> None:
    now = 0.0
    url = f"etcd://{cluster.addresses}/{request.node.name}"
    store = EtcdStore(url, limits=Limits(remembered_requests=10), clock=lambda: now)
    await store.start()
    await store.join(make_card(), rejoin=False)
    for number in range(50):
        await store.offer(make_offer(f"r{number}", ttl_s=5.0))
        if number % 2:
            await store.claim(Claim(f"r{number}"))
    prefix = store._sync._layout.prefix
    for now in (5.0, 7.5, 10.0, 15.0, 17.5, 20.0):  # noqa: B007, a record outlives its ticket
        store.tick()
        await store._sync.pulse()
    while store._mirror.requests:  # deletions go out in the background: a pulse may overtake them
        await asyncio.sleep(0.01)
    _, kvs = await etcd.load(prefix)
    kinds = {kv.key.removeprefix(prefix).split(b"/")[0] for kv in kvs}
    assert kinds == {b"workers", b"epochs", b"pulse"}
    assert (await store.status()).expired == 25
    await store.close()


async def test_tenants_do_not_see_each_other(cluster: EtcdCluster) -> None:
    stores = [EtcdStore(f"etcd://{cluster.addresses}/tenants", tenant=tenant) for tenant in ("", "a", "b")]
    for store in stores:
        await store.start()
    await stores[1].join(make_card(), rejoin=False)
    await stores[1].offer(make_offer("r"))
    for other in (stores[0], stores[2]):
        assert await other.workers() == []
        with pytest.raises(RefusedError):
            await other.claim(Claim("r"))
    assert await stores[1].claim(Claim("r"))
    for store in stores:
        await store.close()


async def test_what_names_no_store_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="'redis://here' does not name a store"):
        await serve(port=0, store="redis://here")


async def test_beats_that_come_close_to_each_other_go_together(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"w{number}" for number in range(10)]
    await asyncio.gather(*(store.join(make_card(name), rejoin=False) for name in names))
    paused_s: list[float] = []
    renewed: list[set[int]] = []
    over = asyncio.Event()

    async def pause(delay_s: float) -> None:
        paused_s.append(delay_s)
        await over.wait()

    async def noted(leases: Iterable[int]) -> set[int]:
        renewed.append(set(leases))
        return renewed[-1]

    monkeypatch.setattr(store._etcd, "keep_alive", noted)
    monkeypatch.setattr(membership, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": pause}))
    beats = [asyncio.create_task(store.beat(name, 1)) for name in names]
    while len(store._members._renewing) < 10:
        await asyncio.sleep(0.01)
    over.set()
    assert await asyncio.gather(*beats) == [True] * 10
    assert paused_s == [membership._TOGETHER_S]
    assert [len(leases) for leases in renewed] == [10]


async def test_a_settle_order_is_deleted_when_it_was_passed_on(store: EtcdStore, etcd: Etcd) -> None:
    await store.join(make_card(), rejoin=False)
    await store.settle(SettleOrder("prefill", 1, 7, 70))
    orders = await store.orders("prefill", 1)
    assert await anext(orders) == SettleOrder("prefill", 1, 7, 70)
    while store._mirror.orders:
        await asyncio.sleep(0.01)
    _, kvs = await etcd.load(store._sync._layout.prefix)
    assert not any(b"settles/" in kv.key for kv in kvs)


async def test_nobody_there_is_said_within_the_patience_of_clients() -> None:
    store = EtcdStore("etcd://127.0.0.1:9")
    await store.start()
    with pytest.raises(RefusedError, match=r"not yet read its store, etcd at 127\.0\.0\.1:9") as refused:
        await store.workers()
    assert refused.value.reason is Reason.NOT_READY
    await store.close()
    etcd = Etcd("127.0.0.1:9")
    with pytest.raises(CoordinatorUnavailable, match=r"etcd at 127\.0\.0\.1:9 does not answer"):
        await etcd.read(b"x")
    await etcd.close()
