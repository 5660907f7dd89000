# SPDX-License-Identifier: Apache-2.0
"""Coordinators to test against: in this event loop, or as processes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing

import pytest
from control.cards import make_card
from control.etcd_cluster import EtcdCluster, start_etcd
from control.fake_etcd import Clock, FakeEtcd
from control.processes import CoordinatorProcess
from making import making

from kvlink.control import CoordinatorClient
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.runtime.background import close_all


@pytest.fixture(autouse=True)
async def nothing_stays_open() -> AsyncIterator[None]:
    """After a failure either: gRPC may wait for ever at exit for a server that nobody stopped."""
    yield
    await close_all()


@pytest.fixture(autouse=True)
def late_answers_count(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim is refused by its coordinator, however late: it never gives up first."""
    if not request.node.get_closest_marker("claims_move_on"):
        monkeypatch.setattr("kvlink.control.client._CLAIM_SLACK_S", 30.0)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """A real one, of one member."""
    with closing(start_etcd()) as etcd:
        yield etcd


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    await coordinator.start()
    yield coordinator
    await coordinator.close()


@pytest.fixture
async def client(coordinator: Coordinator) -> AsyncIterator[CoordinatorClient]:
    async with CoordinatorClient(coordinator.address) as client:
        yield client


@pytest.fixture
def coordinator_process() -> Iterator[Callable[[float], CoordinatorProcess]]:
    with making(lambda lease_s=10.0: CoordinatorProcess(lease_s), "kill") as start:
        yield start


@pytest.fixture
def fake_etcd() -> FakeEtcd:
    return FakeEtcd()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(fake_etcd: FakeEtcd, clock: Clock) -> AsyncIterator[EtcdStore]:
    """Over `fake_etcd`, with one worker."""
    store = EtcdStore("etcd://127.0.0.1:1/fleet", clock=clock, trust=fake_etcd)
    await store.start()
    await store.join(make_card(), rejoin=False)
    await store._sync.tend()
    yield store
    await store.close()
