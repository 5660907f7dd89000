# SPDX-License-Identifier: Apache-2.0
"""Runs the contract of stores on each store in turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from control.cards import make_card
from control.etcd_cluster import EtcdCluster, give_etcd_time, start_etcd
from control.store.stages import STAGES, Stage

from kvlink.coordinator.store import Store


@pytest.fixture(scope="package")
def etcd() -> Iterator[EtcdCluster]:
    etcd = start_etcd()
    yield etcd
    etcd.close()


@pytest.fixture(autouse=True)
def etcd_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    give_etcd_time(monkeypatch)


@pytest.fixture(params=STAGES)
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    stage = STAGES[request.param](request)
    await stage.store.start()
    yield stage
    await stage.store.close()


@pytest.fixture
def store(stage: Stage) -> Store:
    return stage.store


@pytest.fixture
async def joined(stage: Stage) -> Stage:
    await stage.store.join(make_card("prefill"), rejoin=False)
    return stage
