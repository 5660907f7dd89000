# SPDX-License-Identifier: Apache-2.0
"""Measures how costs grow with blocks, peers, leases out and readers, all over shm in this process.

Each cost is the least of some repeats, since load of the machine only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from kvlink import BlockPool, Ticket, Worker, _bench
from kvlink.config import WorkerConfig
from kvlink.layout import KVLayout, dense

from ..harness.block_draws import pieces_of
from ..harness.owner import flat
from ..harness.statistics import steps_of

Row = dict[str, Any]
Costs = Mapping[str, float]

MOST_EXPONENT = 1.25
"""It holds for any step of the tail: four times as many may cost 5.7 times as much. Quadratic costs have 2."""
_TRANSPORT = "shm"
_BLOCK_BYTES = 1024
_SEED = 7
_REPEATS = 30
_SPARE_SLOTS = 64
_PAUSE_S = 0.02
_SWEEPS = 200
_IDLE_S = 0.5
_LEASE_S = 3600.0


class Growth(NamedTuple):
    """A number that costs may grow with, its values, and a function that measures costs at one of them.

    `beside` names the cost of the bare work: another cost may grow by as much more as that does in the same step.
    """

    of: str
    numbers: Sequence[int]
    costs: Callable[[int], Costs]
    beside: str = ""


def parts(growths: Sequence[Growth] | None = None) -> list[Iterator[Row]]:
    """Returns the rows of each growth: its costs at each number, then the exponent of each cost."""
    return [_rows(growth) for growth in growths or GROWTHS]


def _rows(growth: Growth) -> Iterator[Row]:
    curves: dict[str, dict[int, float]] = {}
    for number in growth.numbers:
        for cost, value in growth.costs(number).items():
            curves.setdefault(cost, {})[number] = value
            yield {"of": growth.of, "cost": cost, "number": number, "value": value}
    bare = dict(steps_of(curves[growth.beside])) if growth.beside else {}
    for cost, curve in curves.items():
        verdict = judged(curve, bare)
        if cost == growth.beside:  # what the machine does
            verdict = {name: verdict[name] for name in ("exponent", "to")}
        yield {"of": growth.of, "cost": cost, **verdict}


def judged(curve: Mapping[int, float], bare: Mapping[int, float]) -> Row:
    """Returns the verdict about a curve: the step of its tail that is furthest beyond what it may be.

    A step may be MOST_EXPONENT, and steeper by as much as that of the bare work is steeper than linear.
    """
    steps = [(grows, MOST_EXPONENT + max(0.0, bare.get(to, 1.0) - 1.0), to) for to, grows in steps_of(curve)]
    grows, most, to = max(steps, key=lambda step: step[0] - step[1])
    return {"exponent": grows, "to": to, "needs": f"at most {most:.2f}", "holds": grows <= most}


def of_blocks(blocks: int) -> Costs:
    """Measures one pull of so many blocks in random order at both ends, and bare copies of the same blocks."""
    with ExitStack() as stack:
        layout = _layout(blocks)
        owner, reader = (_worker(stack, layout, name) for name in ("owner", "reader"))
        rng = np.random.default_rng(_SEED)
        from_ids, to_ids = (rng.permutation(blocks).astype(np.uint32) for _ in range(2))
        bases = [worker.pool.regions[0].address for worker in (owner, reader)]
        copies = (
            _bench.baseline_memcpy(pieces_of(from_ids, to_ids, _BLOCK_BYTES, *bases)) for _ in range(_REPEATS)
        )
        return {
            "pull_us": min(_pulls(owner, reader, from_ids.tolist(), to_ids)),
            "copy_us": min(copies) / 1e3,
        }


def of_peers(peers: int) -> Costs:
    """Measures one pull of a block from any of so many connected peers, each after a pull from every other."""
    with ExitStack() as stack:
        layout = _layout(2)
        owners = [_worker(stack, layout, f"owner-{number}") for number in range(peers)]
        reader = _worker(stack, layout, "reader")
        for owner in owners:
            _pulls(owner, reader, [0], [1], 1)
        repeats = range(max(1, _REPEATS // peers))
        return {
            "pull_us": float(
                np.median([_pulls(owner, reader, [0], [1], 1) for _ in repeats for owner in owners])
            )
        }


def of_leases(leases: int) -> Costs:
    """Measures a pull of a block, an offer, a sweep and the CPU of an idle owner with so many other leases out."""
    config = WorkerConfig(lease_slots=leases + _SPARE_SLOTS)
    with ExitStack() as stack:
        layout = _layout(2)
        owner = _worker(stack, layout, "owner", config)
        reader = _worker(stack, layout, "reader")
        offer_us = []
        for number in range(leases):
            start = time.perf_counter_ns()
            owner.offer(f"held-{number}", [0], ttl_s=_LEASE_S)
            offer_us.append((time.perf_counter_ns() - start) / 1e3)
        pull_us = min(_pulls(owner, reader, [0], [1]))
        spent, began = time.process_time(), time.perf_counter()
        time.sleep(_IDLE_S)
        idle = (time.process_time() - spent) / (time.perf_counter() - began)
    shape = (leases + _SPARE_SLOTS, leases)
    return {
        "pull_us": pull_us,
        "offer_us": float(np.median(offer_us[-_SPARE_SLOTS:])),
        "grant_at_us": _bench.grant_at_ns(*shape, _SWEEPS) / 1e3,
        "sweep_us": _bench.sweep_ns(*shape, _SWEEPS) / 1e3,
        "revoke_us": _bench.revoke_ns(*shape, _SWEEPS) / 1e3,
        "vain_revoke_us_per_1000_blocks": _bench.vain_revoke_ns(*shape, _SWEEPS) / 1e3,
        "idle_percent_of_a_core": 100 * idle,
    }


def of_readers(readers: int) -> Costs:
    """Measures one pull of a block by each of so many readers of one owner, one after the other.

    A reader checks that the owner lives before its first pull after a pause, and its memory is in no cache by then. So
    all pause before each round, while another one warms up what they share. Each cost is the least of its reader.
    """
    with ExitStack() as stack:
        layout = _layout(2)
        owner = _worker(stack, layout, "owner")
        busy, *others = [_worker(stack, layout, f"reader-{number}") for number in range(1 + readers)]
        for reader in others:
            _pulls(owner, reader, [0], [1], 1)
        rounds = []
        for _ in range(_REPEATS):
            until = time.monotonic() + _PAUSE_S
            while time.monotonic() < until:
                _pulls(owner, busy, [0], [1])
            rounds.append([_pulls(owner, reader, [0], [1], 1)[0] for reader in others])
        return {"pulls_us": sum(min(each) for each in zip(*rounds, strict=True))}


GROWTHS = (
    Growth("blocks of a pull", [4**power for power in range(9)], of_blocks, "copy_us"),
    Growth("peers", [1, 4, 16, 64, 256], of_peers),
    Growth("leases out", [1, 8, 64, 512, 4096, 32768], of_leases),
    Growth("readers of an owner", [1, 4, 16, 64], of_readers),
)
"""The rows of `kvlink bench growth`, in order."""

_requests = map("growth-{}".format, count())


def _layout(num_blocks: int) -> KVLayout:
    return dense(flat(_BLOCK_BYTES, num_blocks))


def _worker(stack: ExitStack, layout: KVLayout, name: str, config: WorkerConfig | None = None) -> Worker:
    return stack.enter_context(
        Worker(BlockPool.allocate(layout), f"bench-{name}", transports=_TRANSPORT, config=config)
    )


def _pulls(
    owner: Worker, reader: Worker, from_ids: Sequence[int], to_ids: Any, repeats: int = _REPEATS
) -> list[float]:
    """Returns the µs of each pull. Not of the offers, nor of what an owner does after it."""
    took = []
    for _ in range(repeats):
        ticket: Ticket = owner.offer(next(_requests), from_ids, publish=False)
        start = time.perf_counter_ns()
        reader.pull(ticket, into=to_ids).wait()
        took.append((time.perf_counter_ns() - start) / 1e3)
        owner.events()  # takes the lease that was settled
    return took
