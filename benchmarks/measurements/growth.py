# SPDX-License-Identifier: Apache-2.0
"""Measures how costs grow with blocks, peers, leases out, readers and prefixes, all over shm.

All workers are in this process, but for the owners of many peers.

Each cost is the least of some repeats, since load of the machine only adds to it.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

import kvlink
from kvlink import BlockPool, Ticket, Worker, _bench
from kvlink.config import WorkerConfig
from kvlink.layout import KVLayout, dense

from ..harness.block_draws import pieces_of
from ..harness.owner import flat
from ..harness.processes import BenchError, coordinator_process
from ..harness.statistics import steps_of

T = TypeVar("T")
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
_VAIN = 1000
_PREFIX_BLOCKS = 8
_CROWD = 128  # owners of a process: each has some 20 descriptors


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
        yield {"kind": "exponent", "of": growth.of, "cost": cost, **verdict}


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
    """Measures one pull of a block from any of so many connected peers, each after a pull from every other.

    Connecting is a first pull from each peer, one after the other. Its CPU time and its memory are the reader's; the
    owners are in other processes.
    """
    with ExitStack() as stack:
        crowds = [
            stack.enter_context(_crowd(range(first, min(first + _CROWD, peers))))
            for first in range(0, peers, _CROWD)
        ]
        reader = _worker(stack, _layout(2), "reader")

        def pulls() -> list[float]:
            took = []
            for number in range(peers):
                ticket = Ticket.from_text(crowds[number // _CROWD](number % _CROWD))
                start = time.perf_counter_ns()
                reader.pull(ticket, into=[1]).wait()
                took.append((time.perf_counter_ns() - start) / 1e3)
            return took

        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what smaller numbers of peers left
        memory, spent = _resident_bytes(), time.process_time()
        connect_us = pulls()
        spent = time.process_time() - spent
        memory = max(mmap.PAGESIZE, _resident_bytes() - memory)
        pull_us = [us for _ in range(max(1, _REPEATS // peers)) for us in pulls()]
        return {
            "pull_us": float(np.median(pull_us)),
            "connect_all_ms": sum(connect_us) / 1e3,
            "connect_all_cpu_ms": 1e3 * spent,
            "connected_mib": memory / 2**20,
            "idle_percent_of_a_core": _idle_percent(),
        }


@contextmanager
def _crowd(numbers: range) -> Iterator[Callable[[int], str]]:
    """Runs owners in one process. Yields a function that returns a new ticket of one of them."""
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_offer, args=(theirs, numbers))
    process.start()
    theirs.close()

    def offer(index: int) -> str:
        pipe.send(index)
        ticket: str = pipe.recv()
        return ticket

    try:
        yield offer
    except (EOFError, ConnectionError):
        raise BenchError("a process of owners ended; see its messages above") from None
    finally:
        pipe.close()
        process.join()


def _offer(pipe: Connection, numbers: range) -> None:
    with ExitStack() as stack, suppress(EOFError, ConnectionError):
        owners = [_worker(stack, _layout(2), f"owner-{number}") for number in numbers]
        while True:
            owner = owners[pipe.recv()]
            owner.events()  # takes the lease that was settled
            pipe.send(owner.offer(next(_requests), [0], publish=False).to_text())


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
        idle_percent = _idle_percent()
    shape = (leases + _SPARE_SLOTS, leases)
    return {
        "pull_us": pull_us,
        "offer_us": float(np.median(offer_us[-_SPARE_SLOTS:])),
        "grant_at_us": _bench.grant_at_ns(*shape, _SWEEPS) / 1e3,
        "sweep_us": _bench.sweep_ns(*shape, _SWEEPS) / 1e3,
        "revoke_us": _bench.revoke_ns(*shape, _SWEEPS) / 1e3,
        "vain_revoke_us_per_1000_blocks": _bench.vain_revoke_ns(*shape, _SWEEPS) / 1e3,
        "idle_percent_of_a_core": idle_percent,
    }


def of_soft_leases(leases: int) -> Costs:
    """Measures a soft offer, a pull by one, and revokes, of an owner with so many other soft offers out."""
    config = WorkerConfig(lease_slots=leases + 2 * _SPARE_SLOTS)
    with ExitStack() as stack:
        layout = _layout(leases + _REPEATS + _VAIN)
        owner = _worker(stack, layout, "owner", config)
        reader = _worker(stack, layout, "reader")
        for number in range(leases):
            owner.offer_soft(f"soft-{number}", [number])
        tickets, offer_us = _timed(
            lambda number: owner.offer_soft(f"one-{number}", [leases + number]), _REPEATS
        )
        reader.pull(tickets[0], into=[0]).wait()
        _, pull_us = _timed(lambda number: reader.pull(tickets[number], into=[0]).wait(), _REPEATS)
        ended, revoke_us = _timed(lambda number: owner.revoke([leases + number]), _REPEATS)
        unknown = np.arange(leases + _REPEATS, leases + _REPEATS + _VAIN, dtype=np.uint32)
        vain, vain_us = _timed(lambda _: owner.revoke(unknown), _REPEATS)
        if sum(ended) != _REPEATS or any(vain):
            raise BenchError(
                f"{sum(ended)} of {_REPEATS} revokes, and {sum(vain)} in vain, ended a soft offer"
            )
    return {
        "offer_us": float(np.median(offer_us)),
        "pull_us": min(pull_us),
        "revoke_us": min(revoke_us),
        "vain_revoke_us_per_1000_blocks": min(vain_us),
    }


def of_prefixes(prefixes: int) -> Costs:
    """Measures a search in a coordinator's directory that has so many prefixes, and the CPU of publishing them all.

    They begin alike and differ in the last of their blocks. The last one published is the one searched for.
    """
    with ExitStack() as stack:
        coordinator = stack.enter_context(coordinator_process())
        layout = replace(_layout(_PREFIX_BLOCKS), model="growth")
        config = WorkerConfig(lease_slots=prefixes + _SPARE_SLOTS, coordinator=coordinator)
        owner, reader = (_worker(stack, layout, name, config) for name in ("owner", "reader"))
        start = time.process_time()
        for number in range(prefixes):
            digests = kvlink.digest_prefixes([*range(1, _PREFIX_BLOCKS), 10 + number], 1)
            owner.publish_prefix(
                owner.offer_soft(f"prefix-{number}", [*range(_PREFIX_BLOCKS)], digests=digests)
            )

        def search(_: int) -> bool:
            found = reader.find_prefix(digests, tokens_per_digest=1).result()
            return any(each.num_tokens == _PREFIX_BLOCKS for each in found)

        while not search(0):
            time.sleep(_PAUSE_S)
        publish_cpu_ms = 1e3 * (time.process_time() - start)
        found, find_us = _timed(search, _REPEATS)
        if not all(found):
            raise BenchError(
                f"{found.count(False)} of {_REPEATS} searches did not find a prefix of the directory"
            )
    return {"find_us": min(find_us), "publish_all_cpu_ms": publish_cpu_ms}


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


def _timed(call: Callable[[int], T], times: int) -> tuple[list[T], list[float]]:
    """Returns the results of calls with 0, 1, 2, … and how many µs each took."""
    results, took_us = [], []
    for number in range(times):
        start = time.perf_counter_ns()
        results.append(call(number))
        took_us.append((time.perf_counter_ns() - start) / 1e3)
    return results, took_us


def _idle_percent() -> float:
    spent, began = time.process_time(), time.perf_counter()
    time.sleep(_IDLE_S)
    return 100 * (time.process_time() - spent) / (time.perf_counter() - began)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


GROWTHS = (
    Growth("blocks of a pull", [4**power for power in range(9)], of_blocks, "copy_us"),
    Growth("peers", [1, 4, 16, 64, 256, 1024], of_peers),
    Growth("leases out", [1, 8, 64, 512, 4096, 32768], of_leases),
    Growth("soft leases", [1, 8, 64, 512, 4096, 32768], of_soft_leases),
    Growth("prefixes of the directory", [1, 16, 256, 4096], of_prefixes),
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
