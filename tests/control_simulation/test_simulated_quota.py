# SPDX-License-Identifier: Apache-2.0
"""A full etcd still takes puts that are nested, whose room it does not count: that one passed says nothing."""

from __future__ import annotations

import random

import pytest
from control_simulation.etcd import SimulatedEtcd
from control_simulation.network import Network
from control_simulation.processes import Process
from control_simulation.running import in_virtual_time
from control_simulation.serving import SimulatedSecurity

from kvlink.coordinator.store.etcd.api import Etcd, StoreFull, nested, put
from kvlink.v1 import etcd_pb2 as pb


def test_it_counts_as_full_until_a_put_that_is_counted_is_taken() -> None:
    async def main(chance: random.Random) -> None:
        network = Network(chance)
        cluster = SimulatedEtcd(network, quota_bytes=100)
        security = SimulatedSecurity(network=network, process=Process("client", "10.0.0.1"))
        etcd = Etcd(cluster.addresses, security.services())
        one_put = pb.TxnRequest(success=[put(b"key", bytes(100))])
        await etcd.commit(one_put)
        with pytest.raises(StoreFull):
            await etcd.commit(one_put)
        await etcd.commit(pb.TxnRequest(success=[nested(one_put)]))
        assert etcd.health.is_full
        cluster.data.quota_bytes = 1_000
        cluster.disarm()
        await etcd.commit(one_put)
        assert not etcd.health.is_full

    in_virtual_time(1, main)
