# SPDX-License-Identifier: Apache-2.0
"""Defines the faults of a simulated fleet. Each ends by itself, and has been repaired when it returns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

from control_simulation.processes import Process
from control_simulation.workers import CLAIM_S
from control_simulation.world import LEASE_S, CoordinatorSeat, World

from kvlink.control.limits import Limits


class Fault(NamedTuple):
    """One kind. `spares_members`, `spares_handoffs`: alone, it costs no worker its lease, no handoff its tickets.

    `leaves_one`: where there are two coordinators, the other one serves and answers at once.
    """

    inflict: Callable[[World], Awaitable[None]]
    spares_members: bool = False
    spares_handoffs: bool = False
    leaves_one: bool = False

    @property
    def cuts_coordinators(self) -> bool:
        """From workers: one that cannot ask whoever has a worker_id takes him for dead, and lets a duplicate in."""
        return self.inflict is coordinator_cut_off

    @property
    def is_duplicate(self) -> bool:
        """A second process wants the worker_id of one that runs."""
        return self.inflict in (duplicate, duplicate_at_one_address)

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
    if world.chance.random() < 0.4:
        await asyncio.sleep(2 * LEASE_S)
        world.check_lost(worker)
    world.start_worker(worker.worker_id)


async def worker_stopped(world: World) -> None:
    await stopped(world, world.chance.choice(world.workers()).process, 1.0, 40.0)


async def worker_cut_off(world: World) -> None:
    await cut(world, [_any_worker_host(world)], [seat.host for seat in world.seats], 1.0, 40.0)


async def duplicate(world: World) -> None:
    world.start_worker(world.chance.choice(world.workers()).worker_id)
    await pause(world, 5.0, 20.0)


async def duplicate_at_one_address(world: World) -> None:
    """As behind a Service, or with a fixed port on two hosts: both name one agent as their own."""
    first = world.chance.choice(world.running())
    second = world.start_worker(first.worker_id, agent=first.address)
    await pause(world, 5.0, 20.0)
    if first.is_replaced and world.spares_members:
        world.ledger.violated(f"{second} has replaced {first} unasked")
    world.network.kill(second.process)
    if second.session is not None or not first.process.runs:
        world.network.kill(first.process)
        world.start_worker(first.worker_id)


async def worker_drains(world: World) -> None:
    """And is replaced."""
    owner, other = world.chance.sample(world.running(), 2)
    world.note("drain", other.let_drain(owner))
    await pause(world, 2.0, 30.0)
    if world.chance.random() < 0.5:
        world.network.kill(owner.process)
        world.start_worker(owner.worker_id)


async def pauses(world: World) -> None:
    """As garbage collectors and hypervisors make them, of any processes."""
    for _ in range(40):
        each = world.chance.choice([*world.workers(), *world.seats, *world.watchers]).process
        await stopped(world, each, 0.05, 0.5)


async def certificates_renewed(world: World) -> None:
    """All clients reconnect, each at its next call; calls that run end as they would."""
    for _ in range(3):
        world.network.certificates += 1
        await pause(world, 0.1, 5.0)


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


async def coordinator_stutters(world: World) -> None:
    """It hardly runs, while a worker has died."""
    seat = _victim(world)
    dead = world.chance.choice(world.workers())
    world.network.kill(dead.process, silently=True)
    async with seat.one_at_a_time:
        for _ in range(7):
            await stopped(world, seat.process, 6.0, 6.0)
            await asyncio.sleep(0.3)
        if dead.worker_id in {card.worker_id for card in await seat.process.start(seat.store.workers())}:
            world.ledger.violated(f"{dead.process} still counts as joined, 44 s after it died")
    world.start_worker(dead.worker_id)


async def coordinator_killed_when_full(world: World) -> None:
    """The next one has no room for all tickets at first: those that it refused come again when there is some."""
    seat = _victim(world)
    owner, reader = world.chance.sample(world.running(), 2)
    async with seat.one_at_a_time:
        requests = [world.handoffs.offer(owner) for _ in range(6)]
        await asyncio.sleep(1.0)
        seat.kill()
        world.limits = Limits(tickets=3)
        seat.start()
        await asyncio.sleep(8.0)
        world.limits = Limits()
        for request_id in requests:
            world.handoffs.take(request_id, owner, reader, must_succeed=world.has_one_fault)
            await asyncio.sleep(0.5)
        await asyncio.sleep(CLAIM_S + 2.0)
        seat.kill()
        seat.start()


async def coordinator_cut_off(world: World) -> None:
    """From all workers."""
    hosts = [worker.process.host for worker in world.workers()]
    await cut(world, [_victim(world).host], hosts, 1.0, 40.0)


OF_WORKERS = (
    Fault(duplicate, spares_members=True, spares_handoffs=True, leaves_one=True),
    Fault(watcher_stopped, spares_members=True, spares_handoffs=True, leaves_one=True),
    Fault(slow_network, spares_members=True, spares_handoffs=True),
    Fault(duplicate_at_one_address, spares_members=True, spares_handoffs=True, leaves_one=True),
    Fault(worker_drains, leaves_one=True),
    Fault(pauses, spares_members=True, spares_handoffs=True),
    Fault(certificates_renewed, spares_members=True, spares_handoffs=True, leaves_one=True),
    Fault(worker_killed, leaves_one=True),
    Fault(worker_stopped),
    Fault(worker_cut_off),
)
"""Those of all fleets."""

ALONE = (
    *OF_WORKERS,
    Fault(coordinator_killed, spares_handoffs=True),
    Fault(coordinator_terminated, spares_handoffs=True),
    Fault(coordinator_stopped),
    Fault(coordinator_cut_off),
    Fault(coordinator_stutters),
    Fault(coordinator_killed_when_full),
)
"""The faults of a single coordinator, which has everything in its memory."""
