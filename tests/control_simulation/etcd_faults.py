# SPDX-License-Identifier: Apache-2.0
"""Defines the faults of an etcd, and of coordinators that share it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from control_simulation import faults
from control_simulation.etcd_data import Refusal
from control_simulation.faults import Fault, cut, pause, stopped
from control_simulation.world import World

_FULL_S = 320.0
"""Longer than coordinators keep history for each other, and until they compact."""


async def coordinator_without_etcd(world: World) -> None:
    await cut(world, [world.seats[world.victim].host], world.store.hosts, 1.0, 60.0)


async def coordinator_without_history(world: World) -> None:
    """While it is cut off, all that it has missed is compacted away."""

    async def compact() -> None:
        await asyncio.sleep(2.0)
        with suppress(Refusal):
            world.store.data.compact(world.store.data.revision)

    host = world.seats[world.victim].host
    await asyncio.gather(cut(world, [host], world.store.hosts, 3.0, 20.0), compact())


async def coordinators_killed(world: World) -> None:
    for seat in world.seats:
        await seat.one_at_a_time.acquire()
        seat.kill()
    await pause(world, 0.0, 15.0)
    for seat in world.seats:
        seat.start()
        seat.one_at_a_time.release()


async def member_killed(world: World) -> None:
    member = world.store.members[world.store_victim]
    async with world.store.one_at_a_time:
        member.kill()
        await pause(world, 0.0, 20.0)
        member.start()


async def member_stopped(world: World) -> None:
    async with world.store.one_at_a_time:
        await stopped(world, world.store.members[world.store_victim].process, 1.0, 30.0)


async def member_cut_off(world: World) -> None:
    """From the other members, not from coordinators: what it knows grows old."""
    host = world.store.hosts[world.store_victim]
    await cut(world, [host], [other for other in world.store.hosts if other != host], 1.0, 40.0)


async def etcd_cut_off(world: World) -> None:
    """From all coordinators."""
    await cut(world, world.store.hosts, [seat.host for seat in world.seats], 1.0, 40.0)


async def etcd_wiped(world: World) -> None:
    async with world.store.one_at_a_time:
        world.ledger.era += 1
        world.store.wipe(world.store.data.cluster_id + world.chance.randrange(2))


async def etcd_restored(world: World) -> None:
    async with world.store.one_at_a_time:
        snapshot = world.store.data.copy()
        await pause(world, 1.0, 30.0)
        world.ledger.era += 1
        world.store.restore(snapshot)


async def etcd_full(world: World) -> None:
    """The operator waits until coordinators have compacted it, then takes the alarm back."""
    async with world.store.one_at_a_time:
        data = world.store.data
        quota_bytes = data.quota_bytes
        data.quota_bytes = data.num_bytes + 12_000  # more than is alive at one time
        await asyncio.sleep(_FULL_S)
        world.store.disarm()
        await asyncio.sleep(5.0)
        if data.alarm:
            world.ledger.violated(f"coordinators have not compacted a full etcd in {_FULL_S:g} s")
        data.quota_bytes = quota_bytes
        world.store.disarm()


async def quorum_lost(world: World) -> None:
    """Two of three members at a time."""
    async with world.store.one_at_a_time:
        lost = world.chance.sample(world.store.members, 2)
        for member in lost:
            member.kill() if world.chance.random() < 0.5 else member.process.stop()
        world.network.look()
        await pause(world, 0.5, 30.0)
        for member in lost:
            member.process.go_on()
            if not member.process.runs:
                member.start()
        world.network.look()


async def renewals_lost(world: World) -> None:
    """Every other one that arrives."""
    world.store.loses_renewals = True
    await pause(world, 5.0, 30.0)
    world.store.loses_renewals = False


async def watches_lag(world: World) -> None:
    """Another coordinator learns late what one has written."""
    world.store.lags_by_s = 0.3
    for _ in range(10):
        await pause(world, 0.5, 2.0)
        if len(running := world.running()) >= 3:
            world.handoffs.begin("offered again", *world.chance.sample(running, 3))
    world.store.lags_by_s = 0.0


_SHARED = (
    *faults.OF_WORKERS,
    *(
        Fault(inflict, spares_members=True, spares_handoffs=True, leaves_one=True)
        for inflict in (
            faults.coordinator_killed,
            faults.coordinator_terminated,
            faults.coordinator_stopped,
        )
    ),
    *(
        Fault(inflict, spares_members=True, spares_handoffs=True)
        for inflict in (
            renewals_lost,
            watches_lag,
            faults.coordinator_cut_off,
            coordinator_without_etcd,
            coordinator_without_history,
        )
    ),
    Fault(coordinators_killed),
    Fault(etcd_cut_off),
    Fault(etcd_wiped),
    Fault(etcd_restored),
    Fault(etcd_full),
)

SINGLE = (*_SHARED, Fault(member_killed), Fault(member_stopped))
"""The faults of two coordinators that share an etcd of one member."""

REPLICATED = (
    *_SHARED,
    *(
        Fault(inflict, spares_members=True, spares_handoffs=True)
        for inflict in (member_killed, member_stopped, member_cut_off)
    ),
    Fault(quorum_lost),
)
"""As SINGLE, with an etcd of three members."""
