# SPDX-License-Identifier: Apache-2.0
"""Compares real pulls by one to four readers on this machine with a simulation of the same arrivals.

The cost model is fitted to pulls of one reader, without the time they waited. The machine's capacity is taken from as
many readers as the row has, and at least two, that never pause: threads that share cores move less than two of them.
Both are measured just before and just after. The simulation predicts how long requests wait for each other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from kvlink import BlockPool, Ticket, Worker
from kvlink.layout import dense
from kvlink.transfer.cost_model import Cost

from ..harness.block_draws import Order
from ..harness.contents import Contents, Ids
from ..harness.machine import OtherLoad
from ..harness.owner import flat
from ..harness.processes import BenchError, OwnerSide, owner_process
from ..harness.results import verified
from ..prediction.calibration import Sample, fit
from ..workloads.arrivals import Served, gamma_times, open_loop
from .engine import Fleet, Job, Rails, Simulation

BLOCK_BYTES = 64 << 10
SHAPES = (64, 128, 256, 512)
"""The blocks of a pull: 4 to 32 MiB, above the size that runs on the caller's thread."""

READERS = 4
LOAD = 0.6
MOST_DRIFT = 0.1
"""The largest change of one reader's rate between before and after that leaves a row valid."""
_MOST_TRIES = 3
_ALONE_PULLS = 10  # of each shape
_SHARED_PULLS = 40  # of all readers that never pause
_LEAD_S = 0.2
_MOST_S = 15.0  # of one run: everything is offered before it starts, for half a minute
_SEED = 20_250_104

Row = dict[str, Any]


def rows(
    transport: str, requests: int = 400, most_readers: int = READERS, tolerance: float = 0.35
) -> Iterator[Row]:
    """Yields one row per number of readers; one whose machine drifted is measured again.

    Raises ConfigError, BenchError and TransferError.
    """
    with _opened(transport, max(most_readers, 2)) as bench:
        for readers in range(1, most_readers + 1):
            tries = 0
            while True:
                row, tries = _row(bench, requests, readers), tries + 1
                if abs(row["drift"]) <= MOST_DRIFT or tries == _MOST_TRIES:
                    break
            yield {"transport": transport, **row, **judged(row, tolerance), "tries": tries}


def judged(row: Row, tolerance: float) -> Row:
    """Returns whether the simulation holds: by the mean and the median, on a machine that kept its rate meanwhile."""
    wrong = max(abs(row["mean_error"]), abs(row["p50_error"]))
    return {"holds": wrong <= tolerance and abs(row["drift"]) <= MOST_DRIFT, "tolerance": tolerance}


def _row(bench: _Bench, requests: int, readers: int) -> Row:
    noise, owner_ns = OtherLoad(), bench.owner.cpu_ns()
    before = bench.known(readers)
    blocks, jobs = _work(requests, readers, before)
    measured = bench.run(blocks, jobs)
    landed = bench.landed(len(jobs))
    after = bench.known(readers)
    known = Known(before.alone + after.alone, (before.together + after.together) / 2)
    return {
        "readers": readers,
        "requests": len(jobs),
        "load": LOAD,
        **_beside(measured, _simulated(jobs, readers, known)),
        "capacity_gib_per_s": known.capacity / 2**30,
        "alone_gib_per_s": known.rate / 2**30,
        "drift": after.rate / before.rate - 1,
        "other_load": noise.share((bench.owner.cpu_ns() - owner_ns) / 1e9),
        **landed,
    }


class Known(NamedTuple):
    """Measurements of the machine: pulls alone, and the bytes/s of readers that never pause."""

    alone: list[Sample]
    together: float

    @property
    def cost(self) -> Cost:
        """Returns the cost model, fitted to the medians of each shape."""
        shapes = dict.fromkeys((each.ops, each.num_bytes) for each in self.alone)
        return fit(
            [Sample(*shape, median(each.us for each in self.alone if each[:2] == shape)) for shape in shapes]
        )

    @property
    def rate(self) -> float:
        """Returns the bytes/s of one reader once it has begun."""
        cost = self.cost
        return BLOCK_BYTES * 1e9 / (cost.op_ns + BLOCK_BYTES / (cost.gib_per_s * 2**30) * 1e9)

    @property
    def capacity(self) -> float:
        """Returns the bytes/s of all readers, which is at least that of one."""
        return max(self.together, self.rate)


def _work(requests: int, readers: int, known: Known) -> tuple[list[int], list[Job]]:
    """Returns the blocks of each request, and its arrival at a random reader.

    There are at most `requests`, with LOAD as the share of what readers can take.
    """
    rng = np.random.default_rng(_SEED + readers)
    start_s = known.cost.start_us / 1e6
    rate = min(known.capacity, readers * known.rate)
    mean_s = mean(SHAPES) * BLOCK_BYTES / rate + start_s / readers
    requests = max(1, min(requests, int(_MOST_S * LOAD / mean_s)))
    blocks = rng.choice(SHAPES, requests).tolist()
    times = gamma_times(requests, LOAD / mean_s, _SEED + readers)
    of_readers = rng.integers(readers, size=requests).tolist()
    return blocks, [
        Job(at_s, num * BLOCK_BYTES, start_s, 0, reader)
        for at_s, num, reader in zip(times, blocks, of_readers, strict=True)
    ]


def _simulated(jobs: Sequence[Job], readers: int, known: Known) -> list[float]:
    start_s = known.cost.start_us / 1e6
    fleet = Fleet(1, readers, Rails(1, known.capacity, known.rate), pulls=1, lease_s=3600)
    done = Simulation(fleet, [replace(job, start_s=start_s) for job in jobs]).run()
    return [each.took_s * 1e6 for each in done]


def _beside(measured: Sequence[float], simulated: Sequence[float]) -> Row:
    row: Row = {}
    for of, share in (("mean", None), ("p50", 50), ("p90", 90), ("p99", 99)):
        real, made = (
            float(np.mean(us) if share is None else np.percentile(us, share)) for us in (measured, simulated)
        )
        row |= {f"{of}_us": real, f"simulated_{of}_us": made, f"{of}_error": made / real - 1}
    return row


def _good(served: list[Served]) -> list[Served]:
    """Raises the error of a pull that failed, else returns all."""
    if failed := next((each.error for each in served if each.error), None):
        raise failed
    return served


class _Task(NamedTuple):
    ticket: Ticket
    into: Ids
    owner_ids: Ids


class _Bench:
    """One owner process, and readers that are Workers of this one. Large pulls run on their own threads."""

    def __init__(self, owner: OwnerSide, readers: Sequence[Worker]) -> None:
        self.owner, self._readers = owner, readers
        self._rng = np.random.default_rng(_SEED)
        self._contents = Contents(readers[0].pool.layout, _SEED)
        self._names = map("validation-{}".format, count())
        self._last: dict[int, _Task] = {}
        for reader in range(len(readers)):  # connects, and touches pages
            for _ in range(4):
                self._pull(reader, self._task(SHAPES[-1]))

    def known(self, readers: int) -> Known:
        """Measures the first reader with the shapes in turn and the runs' load, then all, or two, without pause."""
        shapes = SHAPES * _ALONE_PULLS
        tasks = list(map(self._task, shapes))
        start = time.perf_counter_ns()
        self._pull(0, self._task(SHAPES[-1]))
        mean_s = (time.perf_counter_ns() - start) / 1e9 * mean(SHAPES) / SHAPES[-1]
        at_s = gamma_times(len(tasks), LOAD / mean_s, _SEED)
        served = _good(open_loop(at_s, lambda _, index: self._pull(0, tasks[index]), 1))
        alone = [
            Sample(num, num * BLOCK_BYTES, each.took_us - each.late_us)
            for num, each in zip(shapes, served, strict=True)
        ]
        return Known(alone, self._together(max(readers, 2)))

    def _together(self, readers: int) -> float:
        each = _SHARED_PULLS // readers
        tasks = [[self._task(SHAPES[-1]) for _ in range(each)] for _ in range(readers)]

        def run(reader: int) -> None:
            for task in tasks[reader]:
                self._pull(reader, task)

        start = time.perf_counter_ns()
        with ThreadPoolExecutor(readers) as threads:
            list(threads.map(run, range(readers)))
        return readers * each * SHAPES[-1] * BLOCK_BYTES / (time.perf_counter_ns() - start) * 1e9

    def run(self, blocks: Sequence[int], jobs: Sequence[Job]) -> list[float]:
        """Returns the µs of each pull from its intended arrival on. A reader has one in flight at a time."""
        tasks = list(map(self._task, blocks))
        for worker in self._readers:
            self._contents.poison(worker.pool, np.arange(worker.pool.layout.num_blocks, dtype=np.uint32))
        self._last.clear()
        mine = [
            [i for i, job in enumerate(jobs) if job.decode == reader] for reader in range(len(self._readers))
        ]
        start_ns = time.monotonic_ns() + int(_LEAD_S * 1e9)

        def read(reader: int) -> list[float]:
            indices = mine[reader]
            at_s = [jobs[index].at_s for index in indices]
            served = open_loop(at_s, lambda _, turn: self._pull(reader, tasks[indices[turn]]), 1, start_ns)
            return [each.took_us for each in _good(served)]

        with ThreadPoolExecutor(len(mine)) as threads:
            return [us for of_reader in threads.map(read, range(len(mine))) for us in of_reader]

    def landed(self, pulls: int) -> Row:
        """Returns how many pulls were right: the last one of every reader, as later ones may overwrite others."""
        wrong = sum(
            not self._contents.equal(self._readers[reader].pool, task.into, task.owner_ids)
            for reader, task in self._last.items()
        )
        return verified(wrong, len(self._last), pulls)

    def _task(self, blocks: int) -> _Task:
        num = self._readers[0].pool.layout.num_blocks
        [owner_ids], [into] = (Order().draw(self._rng, num, [blocks]) for _ in range(2))
        requests = {next(self._names): owner_ids.tolist()}
        (text,) = self.owner.call("offer", requests=requests, num_tokens=None, publish=False)["tickets"]
        return _Task(Ticket.from_text(text), into, owner_ids)

    def _pull(self, reader: int, task: _Task) -> None:
        pull = self._readers[reader].pull(task.ticket, into=task.into)
        pull.wait()
        if not pull.stats.settled:
            raise BenchError(f"{pull!r} returned before it was settled")
        self._last[reader] = task


@contextmanager
def _opened(transport: str, readers: int) -> Iterator[_Bench]:
    geometry = flat(BLOCK_BYTES, 2 * SHAPES[-1])
    layout, here = dense(geometry), transport.endswith("loopback")
    with owner_process(geometry, _SEED, transport, here=here) as owner, ExitStack() as stack:
        names = map("bench-reader-{}".format, range(readers))
        pools = ((name, BlockPool.allocate(layout)) for name in names)
        yield _Bench(
            owner, [stack.enter_context(Worker(pool, name, transports=transport)) for name, pool in pools]
        )
