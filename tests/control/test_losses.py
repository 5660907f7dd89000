# SPDX-License-Identifier: Apache-2.0
"""Three coordinators over an etcd of three, under load, while anything dies: no ticket is lost, none is doubled."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator

import pytest
from control.etcd_cluster import EtcdCluster
from control.fleet import Fleet, Load, three_of_each

pytestmark = [pytest.mark.claims_move_on, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with three_of_each() as fleet:
        yield fleet


@pytest.fixture
async def load(fleet: Fleet) -> AsyncIterator[Load]:
    async with Load(fleet.addresses) as load:
        await load.goes_on()
        yield load
    load.check()
    assert len(load.brought) == load.num_offered
    assert load.num_empty > 0
    print(f"{load.num_offered} handoffs, the slowest in {load.slowest_s:.2f} s", end=" ")


async def bring_back(etcd: EtcdCluster, number: int) -> None:
    etcd.start(number)
    await asyncio.to_thread(etcd.wait)


async def test_each_coordinator_is_killed_in_turn(fleet: Fleet, load: Load) -> None:
    for victim in fleet.replicas:
        victim.kill()
        await load.goes_on()
        await asyncio.to_thread(victim.start)
        await load.goes_on(50)


async def test_each_coordinator_drains_in_turn(fleet: Fleet, load: Load) -> None:
    for victim in fleet.replicas:
        victim.send(signal.SIGTERM)
        await asyncio.to_thread(victim.process.communicate)
        assert victim.process.returncode == 0
        await load.goes_on(50)
        await asyncio.to_thread(victim.start)


async def test_each_member_of_etcd_is_killed_in_turn(fleet: Fleet, load: Load) -> None:
    for number in range(3):
        fleet.etcd.kill(number)
        await load.goes_on()
        await bring_back(fleet.etcd, number)


async def test_all_coordinators_restart_at_once(fleet: Fleet, load: Load) -> None:
    for victim in fleet.replicas:
        victim.kill()
    for victim in fleet.replicas:
        await asyncio.to_thread(victim.start)
    await load.goes_on()


async def test_all_of_etcd_restarts_at_once(fleet: Fleet, load: Load) -> None:
    for number in range(3):
        fleet.etcd.kill(number)
    await asyncio.sleep(3.0)
    for number in range(3):
        fleet.etcd.start(number)
    await asyncio.to_thread(fleet.etcd.wait)
    await load.goes_on()


async def test_a_coordinator_and_a_member_stop_without_closing(fleet: Fleet, load: Load) -> None:
    victim = next(replica for replica in fleet.replicas if replica.address == load.asked)
    victim.send(signal.SIGSTOP)
    fleet.etcd.send(0, signal.SIGSTOP)
    try:
        await load.goes_on()
    finally:
        victim.send(signal.SIGCONT)
        fleet.etcd.send(0, signal.SIGCONT)
    await load.goes_on(50)
