# SPDX-License-Identifier: Apache-2.0
"""A real etcd is emptied, or restored from a snapshot, under two coordinators, a worker and readers that live on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import RestorableEtcd, need_etcdctl, start_etcd
from control.processes import CoordinatorProcess

from kvlink.control import CoordinatorClient
from kvlink.control.session import Session
from kvlink.coordinator.store.etcd.api import Etcd, put
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.v1 import etcd_pb2 as pb

pytestmark = [pytest.mark.verify, pytest.mark.claims_move_on, pytest.mark.timeout(180)]

_LEASE_S = 3.0
_REVISIONS = 10_000
_MOST_CPU_S = 3.0
"""Bounds the CPU time of one coordinator in a test; one that spins takes it in as many seconds."""


@pytest.fixture
def wiped_etcd() -> Iterator[RestorableEtcd]:
    need_etcdctl()
    etcd = start_etcd()
    yield etcd
    etcd.close()


@pytest.fixture
def replicas(wiped_etcd: RestorableEtcd) -> Iterator[list[CoordinatorProcess]]:
    store = f"etcd://{wiped_etcd.addresses}/wiped"
    replicas = [CoordinatorProcess(_LEASE_S, store) for _ in range(2)]
    yield replicas
    for each in replicas:
        each.kill()


def cpu_s(process: CoordinatorProcess) -> float:
    fields = Path(f"/proc/{process.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def hand_off(session: Session, readers: list[CoordinatorClient], name: str) -> None:
    """At each coordinator one request."""
    for number, reader in enumerate(readers):
        offer = make_offer(f"{name}-{number}", session.card.worker_id, session.card.epoch, ttl_s=60.0)
        await session.offer(offer, timeout_s=30.0)
        assert await reader.claim(offer.request_id, timeout_s=30.0) == [offer.ticket]
        session.forget(offer.request_id)


async def grow_old(cluster: RestorableEtcd) -> None:
    """Makes revisions, which coordinators receive, that an emptied etcd does not reach within the test."""
    etcd = Etcd(cluster.addresses)
    for _ in range(_REVISIONS // 100):
        txn = pb.TxnRequest(success=[put(Keys("wiped").pulse, b"")])
        await asyncio.gather(*(etcd.commit(txn) for _ in range(100)))
    await etcd.close()


async def lives_through(
    cluster: RestorableEtcd, replicas: list[CoordinatorProcess], meanwhile: Callable[[], None]
) -> None:
    await grow_old(cluster)
    addresses = ",".join(each.address for each in replicas)
    async with (
        CoordinatorClient(addresses) as client,
        CoordinatorClient(replicas[0].address) as first,
        CoordinatorClient(replicas[1].address) as second,
    ):
        session = await Session.join(client, make_card(), lambda slot, nonce: None, 20.0)
        held = make_offer("held", ttl_s=300.0)
        await session.offer(held)
        for number in range(20):
            await hand_off(session, [first, second], f"before-{number}")
        await asyncio.to_thread(meanwhile)
        before_s = [cpu_s(each) for each in replicas]
        for number in range(20):
            await hand_off(session, [first, second], f"after-{number}")
        await asyncio.sleep(2 * _LEASE_S)
        await hand_off(session, [first, second], "later")
        assert await second.claim("held", timeout_s=10.0) == [held.ticket], "it was offered again"
        for reader in (first, second):
            assert [card.worker_id for card in await reader.workers()] == ["prefill"]
        assert session.num_rejoins <= 3
        await session.close()
    for each, before in zip(replicas, before_s, strict=True):
        assert cpu_s(each) - before < _MOST_CPU_S


async def test_it_comes_back_empty(wiped_etcd: RestorableEtcd, replicas: list[CoordinatorProcess]) -> None:
    await lives_through(wiped_etcd, replicas, wiped_etcd.wipe)


async def test_it_comes_back_empty_and_others_have_written_more(
    wiped_etcd: RestorableEtcd, replicas: list[CoordinatorProcess]
) -> None:
    def wipe_and_overtake() -> None:
        wiped_etcd.wipe()
        asyncio.run(grow_old(wiped_etcd))
        asyncio.run(grow_old(wiped_etcd))

    await lives_through(wiped_etcd, replicas, wipe_and_overtake)


async def test_it_comes_back_from_a_snapshot(
    wiped_etcd: RestorableEtcd, replicas: list[CoordinatorProcess]
) -> None:
    snapshot = wiped_etcd.save()
    await lives_through(wiped_etcd, replicas, lambda: wiped_etcd.restore(snapshot))


async def test_it_comes_back_from_a_snapshot_that_knows_the_worker(
    wiped_etcd: RestorableEtcd, replicas: list[CoordinatorProcess]
) -> None:
    def save_and_restore() -> None:
        snapshot = wiped_etcd.save()
        asyncio.run(grow_old(wiped_etcd))
        wiped_etcd.restore(snapshot)

    await lives_through(wiped_etcd, replicas, save_and_restore)
