# SPDX-License-Identifier: Apache-2.0
"""Defines the faults of a simulated fleet. Each ends by itself, and has been repaired when it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from control_simulation.processes import Process
from control_simulation.world import CoordinatorSeat, World


class Fault(NamedTuple):
    """One kind. `spares_members`, `spares_handoffs`: alone, it costs no worker its lease, no handoff its tickets."""

    inflict: Callable[[World], Awaitable[None]]
    spares_members: bool = False
    spares_handoffs: bool = False
    leaves_one: bool = False

    @property
    def cuts_coordinators(self) -> bool:
        """From workers: one that cannot ask whoever has a worker_id takes him for dead, and lets a duplicate in."""
        return self.inflict is coordinator_cut_off

    @property
    def name(self) -> str:
        return self.inflict.__name__


async def pause(world: World, least_s: float, most_s: float) -> None:
    await asyncio.sleep(world.chance.uniform(least_s, most_s))


async def stopped(world: World, process: Process, least_s: float, most_s: float) -> None:
    process.stop()
    world.network.look()
    await pause(world, least_s, most_s)
    process.go_on()
    world.network.look()


def _any_worker_host(world: World) -> str:
    return world.chance.choice(world.workers()).process.host


def _victim(world: World) -> CoordinatorSeat:
    """The same one for all faults of a round: the others are well."""
    return world.seats[world.victim]


async def cut(
    world: World, some: Iterable[str], others: Iterable[str], least_s: float, most_s: float
) -> None:
    """Both ways, or one."""
    ways = [(one, other) for one in some for other in others]
    back = [(other, one) for one, other in ways]
    chosen = world.chance.choice([ways + back, ways, back])
    for way in chosen:
        world.network.cut(*way)
    await pause(world, least_s, most_s)
    for way in chosen:
        world.network.restore(*way)


async def worker_killed(world: World) -> None:
    worker = world.chance.choice(world.workers())
    world.network.kill(worker.process, silently=world.chance.random() < 0.3)
    await pause(world, 0.0, 15.0)
    world.start_worker(worker.worker_id)


async def worker_stopped(world: World) -> None:
    await stopped(world, world.chance.choice(world.workers()).process, 1.0, 40.0)


async def worker_cut_off(world: World) -> None:
    await cut(world, [_any_worker_host(world)], [seat.host for seat in world.seats], 1.0, 40.0)


async def duplicate(world: World) -> None:
    world.start_worker(world.chance.choice(world.workers()).worker_id)
    await pause(world, 5.0, 20.0)


async def slow_network(world: World) -> None:
    world.network.loss, world.network.slowness = 0.05, 40.0
    await pause(world, 5.0, 30.0)
    world.network.loss, world.network.slowness = 0.0, 1.0


async def watcher_stopped(world: World) -> None:
    await stopped(world, world.chance.choice(world.watchers).process, 5.0, 60.0)


async def coordinator_killed(world: World) -> None:
    seat = _victim(world)
    async with seat.one_at_a_time:
        seat.kill()
        await pause(world, 0.0, 4.0)
        seat.start()


async def coordinator_terminated(world: World) -> None:
    seat = _victim(world)
    async with seat.one_at_a_time:
        await seat.terminate()
        await pause(world, 0.0, 2.0)
        seat.start()


async def coordinator_stopped(world: World) -> None:
    seat = _victim(world)
    async with seat.one_at_a_time:
        await stopped(world, seat.process, 1.0, 40.0)


async def coordinator_cut_off(world: World) -> None:
    """From all workers."""
    hosts = [worker.process.host for worker in world.workers()]
    await cut(world, [_victim(world).host], hosts, 1.0, 40.0)


ALONE = (
    Fault(duplicate, spares_members=True, spares_handoffs=True),
    Fault(watcher_stopped, spares_members=True, spares_handoffs=True),
    Fault(slow_network, spares_members=True, spares_handoffs=True),
    Fault(worker_killed),
    Fault(worker_stopped),
    Fault(worker_cut_off),
    Fault(coordinator_killed, spares_handoffs=True),
    Fault(coordinator_terminated, spares_handoffs=True),
    Fault(coordinator_stopped),
    Fault(coordinator_cut_off),
)
"""The faults of a single coordinator, which has everything in its memory."""
