# SPDX-License-Identifier: Apache-2.0
"""As many leases as a coordinator may have workers are renewed in time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import cast

import pytest
from control.etcd_cluster import EtcdCluster, start_etcd
from virtual_time import run

from kvlink.control import Limits
from kvlink.control.rpc.channel import Channel
from kvlink.coordinator.store.etcd import api
from kvlink.coordinator.store.etcd.api import Etcd
from kvlink.v1 import etcd_pb2 as pb

NUM_LEASES = Limits().workers


class _Busy:
    """A member that takes 0.1 ms for each lease, and 5 ms to begin."""

    def __init__(self) -> None:
        self.num_calls = 0

    def open(self, method: object) -> _Busy:
        self.num_calls += 1
        self._leases: list[int] = []
        return self

    async def send(self, request: pb.LeaseKeepAliveRequest) -> None:
        self._leases.append(request.ID)

    async def finish(self) -> None:
        await asyncio.sleep(0.005)

    async def receive(self) -> pb.LeaseKeepAliveResponse | None:
        if not self._leases:
            return None
        await asyncio.sleep(0.0001)
        lease = self._leases.pop()
        return pb.LeaseKeepAliveResponse(ID=lease, TTL=0 if lease % 7 == 0 else 10)

    def leave(self) -> None:
        raise AssertionError("it was slow, and not away")

    def cancel(self) -> None:
        pass


def test_a_member_that_takes_a_second_for_all_of_them_renews_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = _Busy()
    monkeypatch.setattr(api, "Channel", lambda *_, **__: cast(Channel, busy))

    async def main() -> set[int]:
        return await Etcd("busy:2379").keep_alive(range(1, NUM_LEASES + 1))

    assert run(main) == {lease for lease in range(1, NUM_LEASES + 1) if lease % 7}
    assert busy.num_calls == 20


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    with closing(start_etcd()) as etcd:
        yield etcd


async def test_ten_thousand_leases_of_a_real_etcd(etcd: EtcdCluster) -> None:
    client = Etcd(etcd.addresses)
    leases: set[int] = set()
    for _ in range(NUM_LEASES // 100):
        leases.update(await asyncio.gather(*(client.grant(600) for _ in range(100))))
    for _ in range(3):
        assert await client.keep_alive(leases) == leases
    await client.close()
