# SPDX-License-Identifier: Apache-2.0
"""The simulated etcd does what a real one does, as far as the store relies on it. The real one is outside the gate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from control.etcd_cluster import EtcdCluster, start_etcd
from control_simulation.etcd import SimulatedEtcd
from control_simulation.etcd_contract import CASES, Case, a_full_one_refuses_what_needs_room
from control_simulation.network import Network
from control_simulation.processes import Process
from control_simulation.running import in_virtual_time
from control_simulation.serving import SimulatedSecurity

from kvlink.control.security import Security
from kvlink.coordinator.store.etcd.api import Etcd

_numbers = itertools.count()
_QUOTA = 16 << 20


def _name(case: Case) -> str:
    return case.__name__


@pytest.mark.parametrize("num_members", [1, 3])
@pytest.mark.parametrize("case", [*CASES, a_full_one_refuses_what_needs_room], ids=_name)
def test_the_simulated_one(case: Case, num_members: int) -> None:
    async def main(chance: object) -> None:
        network = Network(chance)
        cluster = SimulatedEtcd(network, num_members, _QUOTA)
        client = Process("client", "10.0.0.1")

        async def call() -> None:
            security = SimulatedSecurity(network=network, process=client)
            await case(Etcd(cluster.addresses, security.services()), b"/case/")

        await client.start(call())

    in_virtual_time(1, main)


@pytest.fixture(scope="module")
def real() -> Iterator[EtcdCluster]:
    cluster = start_etcd()
    yield cluster
    cluster.close()


@pytest.mark.verify
@pytest.mark.parametrize("case", CASES, ids=_name)
async def test_a_real_one(case: Case, real: EtcdCluster) -> None:
    await _hold(real, case)


@pytest.mark.verify
async def test_a_real_one_that_is_full() -> None:
    cluster = start_etcd(quota_backend_bytes=str(_QUOTA))
    try:
        await _hold(cluster, a_full_one_refuses_what_needs_room)
    finally:
        cluster.close()


async def _hold(cluster: EtcdCluster, case: Case) -> None:
    etcd = Etcd(cluster.addresses, Security().services())
    try:
        await case(etcd, b"/case%d/" % next(_numbers))
    finally:
        await etcd.close()
