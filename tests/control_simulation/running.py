# SPDX-License-Identifier: Apache-2.0
"""Runs one seed: rounds of faults, each followed by two leases of peace and a check of everything."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from control_simulation import etcd_faults, faults, workers
from control_simulation.faults import Fault
from control_simulation.handoffs import KINDS
from control_simulation.processes import SimulatedLoop
from control_simulation.workers import CLAIM_S
from control_simulation.world import LEASE_S, World

from kvlink.control import agent

T = TypeVar("T")

_NUM_ROUNDS = 5
_CALLS = (
    "claim",
    "claim cancelled",
    "claim sent again",
    "claim withdrawn late",
    "claim after the end",
    "denied",
    "drain",
    "find",
    "find, in vain",
    "handoff in vain",
    "join",
    "lost",
    "no lookup",
    "prefix found at rest",
    "prefix withdrawn",
    "settle",
    "settle, in vain",
    "settle at rest",
    "settle without a stream",
    "visit",
    "visit, in vain",
    "visit at rest",
)
_KINDS = {0: faults.ALONE, 1: etcd_faults.SINGLE, 3: etcd_faults.REPLICATED}
"""By the number of etcd's members."""


def kinds_of_events() -> list[str]:
    """Returns what can occur in a run."""
    inflicted = {fault.name for kinds in _KINDS.values() for fault in kinds}
    return sorted(
        [*(f"fault, {name}" for name in inflicted), *(f"handoff, {kind}" for kind in KINDS), *_CALLS]
    )


class Outcome(NamedTuple):
    """Holds the result of one seed."""

    violations: list[str]
    trace: str
    virtual_s: float
    faults: list[str]
    world: World
    seed: int

    def __str__(self) -> str:
        """Says what went wrong, after which faults, and how to see it again."""
        lines = [
            *self.violations[:10],
            f"after {', '.join(self.faults)}",
            f"again: make simulate SEEDS={self.seed}",
        ]
        return "\n".join([f"seed {self.seed}:", *lines])


def simulate(seed: int) -> Outcome:
    """The same outcome for each seed each time."""
    return in_virtual_time(seed, lambda chance: _run(seed, chance))


async def _run(seed: int, chance: random.Random) -> Outcome:
    loop = asyncio.get_running_loop()
    num_members = chance.choice((0, 0, 1, 1, 3))
    world, kinds = World(chance, num_members), _KINDS[num_members]
    loop.set_exception_handler(lambda _, context: world.ledger.violated(f"nobody took care of {context}"))
    inflicted = [f"{num_members} members of etcd"]
    with _listening(world):
        await asyncio.sleep(LEASE_S)
        for _ in range(_NUM_ROUNDS):
            chosen = chance.choices(kinds, k=chance.choice((1, 1, 2, 3)))
            inflicted.append(f"{loop.time():.0f} s: {'+'.join(fault.name for fault in chosen)}")
            await _round(world, chosen)
            if world.ledger.violations:
                break
    return Outcome(world.ledger.violations, world.network.trace, loop.time(), inflicted, world, seed)


async def _round(world: World, chosen: Sequence[Fault]) -> None:
    chance = world.chance
    world.victim = chance.randrange(len(world.seats))
    if world.etcd is not None:
        world.store_victim = chance.randrange(len(world.etcd.members))
    world.spares_members = all(fault.spares_members for fault in chosen) and not (
        any(fault.cuts_coordinators for fault in chosen) and any(fault.is_duplicate for fault in chosen)
    )
    world.handoffs.must_succeed = chosen[0].spares_handoffs if len(chosen) == 1 else world.spares_members
    harmless = [fault for fault in chosen if fault.spares_members and not fault.is_duplicate]
    world.has_only_one = len(chosen) == 1
    world.has_one_fault = len(chosen) - len(harmless) <= 1
    world.leaves_one = len(world.seats) > 1 and all(fault.leaves_one for fault in chosen)
    before = {worker: worker.num_rejoins for worker in world.running()}
    beside = [
        asyncio.ensure_future(each)
        for each in (world.traffic(), world.look_for_stale_ones(), world.look_for_hung_ones())
    ]

    async def later(fault: Fault) -> None:
        await asyncio.sleep(chance.uniform(2.0, 12.0))
        world.ledger.done[f"fault, {fault.name}"] += 1
        await fault.inflict(world)

    await asyncio.gather(*map(later, chosen))
    await asyncio.sleep(2 * LEASE_S)
    world.check_settled()
    if world.spares_members:
        for worker, num_rejoins in before.items():
            if not worker.is_joined or (world.etcd is None and worker.num_rejoins != num_rejoins):
                world.ledger.violated(f"{worker} lost its membership")
    world.bury()
    for task in beside:
        task.cancel()
    await asyncio.sleep(CLAIM_S + 2.0)
    world.spares_members = world.handoffs.must_succeed = world.leaves_one = False
    await world.check_restart()
    await world.check_calls()
    await world.check_bounds()


@contextmanager
def _listening(world: World) -> Iterator[None]:
    log = logging.getLogger("kvlink.control")
    before = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    log.addHandler(world.lines)
    try:
        yield
    finally:
        log.removeHandler(world.lines)
        log.level, log.propagate = before


def in_virtual_time(seed: int, main: Callable[[random.Random], Coroutine[Any, Any, T]]) -> T:
    """All randomness of this process comes from the seed meanwhile."""
    chance = random.Random(seed)
    workers.restart_numbers()
    before = random.getstate()
    random.seed(chance.random())
    loop = SimulatedLoop()
    try:
        with (
            mock.patch.object(os, "urandom", random.randbytes),
            mock.patch.object(random, "_urandom", random.randbytes),  # SystemRandom's, and that of secrets
            mock.patch.object(agent, "off_loop", _at_once),
        ):
            return loop.run_until_complete(main(chance))
    finally:
        random.setstate(before)
        _end(loop)
        loop.close()


async def _at_once(call: Callable[..., T], *args: Any) -> T:
    """In place of a thread, for which virtual time would not wait."""
    return call(*args)


def _end(loop: SimulatedLoop) -> None:
    """Cancels everything."""
    loop.set_exception_handler(lambda *_: None)
    loop.end_processes()
    log = logging.getLogger("kvlink.control")
    log.disabled = True
    for _ in range(10):
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
    log.disabled = False
