# SPDX-License-Identifier: Apache-2.0
"""Measures a pull between two processes, in turns with the physical limit of the same path.

The time of kvlink is what a Python caller sees with a ticket and a warm connection: from `worker.pull` until `wait`
returns, so plan, read, validate and settle. The time of the limit is that of the bare copy alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvlink import BlockPool, Ticket, Worker
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense

from ..harness.baselines import Baseline, baselines_of, num_baselines, references_of
from ..harness.block_draws import Fragmentation
from ..harness.contents import Contents, Ids
from ..harness.processes import BenchError, OwnerSide, owner_process
from ..harness.quantiles import quantiles_us, with_median_interval
from ..workloads.fragmentation import order_of

_BLOCK_BYTES, _BLOCKS = (16 << 10, 64 << 10), 4096
SHAPES = (*((size, _BLOCKS) for size in _BLOCK_BYTES), (16 << 10, 1))
"""The (block_bytes, blocks) of the rows that the performance bars refer to."""

_SMALL_BYTES = 1 << 20  # pulls up to this size are prepared in batches, and every one is verified
_BATCH = 32
_SMALL_ITERS, _LARGE_ITERS = 2000, 100
_VERIFY_EVERY = 8  # of large pulls, besides the first and the last
_CPU_ROUNDS = 4
_BARE_READS = 500
_CPU_TAIL_S = 0.002  # the owner may still process a settle
_MOST_BYTES = 512 << 20
_LEAST_SECTION_BYTES = 64 << 20  # beyond the caches of a core
_SEED = 20_250_101


def shapes(block_bytes: Sequence[int] | None, blocks: int | None) -> list[tuple[int, int]]:
    """Returns the (block_bytes, blocks) of each row, or SHAPES by default."""
    if not block_bytes and blocks is None:
        return list(SHAPES)
    return [(size, blocks or _BLOCKS) for size in block_bytes or _BLOCK_BYTES]


def rows(
    transport: str,
    block_bytes: int,
    blocks: int,
    iters: int | None = None,
    order: str = "random",
    trace: str = "",
) -> Iterator[dict[str, Any]]:
    """Yields one row. `iters` None fits the size. `order` and `trace` are parsed by order_of.

    Raises ConfigError, BenchError and TransferError.
    """
    num_bytes = blocks * block_bytes
    if num_bytes > _MOST_BYTES:
        raise ConfigError(
            f"{blocks} blocks of {block_bytes} bytes are more than the {_MOST_BYTES >> 20} MiB that one pull of a "
            "benchmark may have, since its pools are several times larger; ask for fewer blocks"
        )
    small = num_bytes <= _SMALL_BYTES
    iters = iters or (_SMALL_ITERS if small else _LARGE_ITERS)
    with _opened(transport, block_bytes, blocks, order_of(order, blocks, trace)) as bench:
        batch = bench.fitting(_BATCH) if small else 1
        bench.warm_up(batch)
        for part in (iters - iters // 2, iters // 2):
            bench.refer(block_bytes, blocks, transport)
            bench.measure(part, batch, 1 if small else _VERIFY_EVERY)
        bench.refer(block_bytes, blocks, transport)
        cpu_s = bench.cpu_s_per_pull(batch)
        yield {
            "transport": transport,
            "block_bytes": block_bytes,
            "blocks": blocks,
            "bytes": num_bytes,
            "iters": iters,
            "order": f"{order} {Path(trace).name}".rstrip(),
            **bench.times(num_bytes, alone=blocks == 1),
            "cpu_s_per_gib": cpu_s / (num_bytes / 2**30),
            "verified": bench.verified > 0 and bench.wrong == 0,
            "verified_pulls": bench.verified,
        }


_LONG = {"bytes", "p90_us", "p999_us", "gb_per_s"}


def brief(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row that fits a screen."""
    return with_median_interval(row, _LONG)


class _Mover(NamedTuple):
    """One way of moving the blocks. kvlink's is the first, the others are baselines."""

    name: str
    run: Callable[[_Draw], float]


class _Draw(NamedTuple):
    """A prepared transfer."""

    owner_ids: Ids
    ids: Ids
    ticket: Ticket | None


class _Bench:
    """Lets each mover move blocks from anywhere in the owner's pool to its own section of the reader's."""

    def __init__(
        self, owner: OwnerSide, worker: Worker, ways: Sequence[_Mover], order: Fragmentation, blocks: int
    ) -> None:
        self._owner, self._worker, self._ways = owner, worker, ways
        self._order, self._blocks = order, blocks
        self._contents = Contents(worker.pool.layout, _SEED)
        self._owner_blocks = worker.pool.layout.num_blocks  # both pools have the same size
        self._section = self._owner_blocks // len(ways)
        self._rng = np.random.default_rng(_SEED)
        self._requests = map("pull-{}".format, count())
        self._us: list[list[float]] = [[] for _ in ways]
        self._read_us: list[float] = []
        self._lanes = 1
        self.ran_inline = True
        self._references: dict[str, list[float]] = {}
        self._bare_us: list[float] = []  # bare reads between them
        self._turn = 0  # another one goes first each time
        self.verified = self.wrong = 0

    def fitting(self, batch: int) -> int:
        """Returns how many transfers, at most `batch`, can be prepared at a time."""
        return min(batch, self._order.lists_in(self._section, self._blocks))

    def warm_up(self, batch: int) -> None:
        """Connects, and touches every page of both pools by the path that is measured."""
        everything = np.arange(self._owner_blocks, dtype=np.uint32)
        for ids in np.array_split(everything, -(-self._owner_blocks // self._section)):
            [ticket] = self._offer([ids])
            pull = self._worker.pull(ticket, into=ids)
            pull.wait()
            self._lanes = pull.explain()[0].lanes
        self._round(batch, check=True)
        self._us = [[] for _ in self._ways]
        self._read_us = []
        self.verified = 0

    def measure(self, iters: int, batch: int, verify_every: int) -> None:
        """Alternates between the movers, transfer by transfer."""
        for number, at in enumerate(range(0, iters, batch)):
            size = min(batch, iters - at)
            self._round(size, check=number % verify_every == 0 or at + size == iters)

    def refer(self, block_bytes: int, blocks: int, transport: str) -> None:
        """Lets the other programs measure, over as many lanes as pulls of this size have."""
        lanes = self._lanes if blocks * block_bytes > _SMALL_BYTES else 1
        for reference in references_of(transport, block_bytes, blocks, lanes):
            self._references.setdefault(reference.name, []).append(reference.run())
            if blocks == 1:
                self._bare_us.append(self._bare_read_us())

    def cpu_s_per_pull(self, batch: int) -> float:
        """Returns the CPU time of both processes per pull, for consecutive pulls alone."""
        spent = 0
        for _ in range(_CPU_ROUNDS):
            draws = self._draw(0, batch)
            start = time.process_time_ns() + self._owner.cpu_ns()
            for draw in draws:
                self._pull(draw)
            own = time.process_time_ns()
            time.sleep(_CPU_TAIL_S)
            spent += own + self._owner.cpu_ns() - start
        return spent / 1e9 / (_CPU_ROUNDS * batch)

    def times(self, num_bytes: int, alone: bool) -> dict[str, Any]:
        """Returns the times of kvlink, and of the fastest baseline."""
        ours, *baselines = self._us
        p50 = float(np.median(ours))
        others = dict(zip([way.name for way in self._ways[1:]], baselines, strict=True)) | self._references
        nothing = (float("nan"), "perftest is not installed")
        limit_us, limit = min(((float(np.median(us)), name) for name, us in others.items()), default=nothing)
        gib = num_bytes / 2**30
        return {
            "min_us": min(ours),
            **quantiles_us(ours),
            "p50_us": p50,
            "read_us": float(np.median(self._read_us)),
            "gib_per_s": gib / (p50 / 1e6),
            "gb_per_s": num_bytes / 1e3 / p50,
            "limit": limit,
            "limit_gib_per_s": gib / (limit_us / 1e6),
            "of_limit": limit_us / p50,
            **({"of_memcpy": float(np.median(others["memcpy"])) / p50} if "memcpy" in others else {}),
            **({"limit_us": limit_us, "overhead_us": p50 - limit_us} if alone else {}),
            **({"bare_read_us": float(np.median(self._bare_us))} if self._bare_us else {}),
        }

    def _bare_read_us(self) -> float:
        """Returns the time of the transport to read one block without plan, lease and Python, like ib_read_lat."""
        (peer,) = self._worker.peers()
        to, size = self._worker.pool.regions[0].address, self._worker.pool.layout.block_bytes
        offsets = (index % self._owner_blocks * size for index in range(_BARE_READS))
        reads = (peer.connection.time_read(0, offset, to, size) for offset in offsets)
        return float(np.median(list(reads))) / 1000

    def _round(self, size: int, *, check: bool) -> None:
        plans = [self._draw(index, size) for index in range(len(self._ways))]
        if check:
            for draw in chain.from_iterable(plans):
                self._contents.poison(self._worker.pool, draw.ids)
        for turn in range(size):
            for step in range(len(plans)):
                index = (self._turn + step) % len(plans)
                draw = plans[index][turn]
                self._us[index].append(self._pull(draw) if index == 0 else self._ways[index].run(draw))
            self._turn += 1
        if check:
            self.verified += size
            self.wrong += sum(not self._landed(draw) for draw in plans[0])
            for way, draws in zip(self._ways[1:], plans[1:], strict=True):
                if not all(map(self._landed, draws)):
                    raise BenchError(f"{way.name} copied wrong bytes, so the limit is invalid; report this")

    def _pull(self, draw: _Draw) -> float:
        assert draw.ticket is not None
        start = time.perf_counter_ns()
        pull = self._worker.pull(draw.ticket, into=draw.ids)
        pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        stats = pull.stats
        if not stats.settled:
            raise BenchError(f"{pull!r} returned before it was settled")
        self._read_us.append(stats.read_us)
        self.ran_inline = stats.ran_inline
        return took_us

    def _landed(self, draw: _Draw) -> bool:
        return self._contents.equal(self._worker.pool, draw.ids, draw.owner_ids)

    def _draw(self, index: int, size: int) -> list[_Draw]:
        owner_ids = self._order.draw(self._rng, self._owner_blocks, size, self._blocks)
        offset = np.uint32(index * self._section)
        ids = [drawn + offset for drawn in self._order.draw(self._rng, self._section, size, self._blocks)]
        tickets = self._offer(owner_ids) if index == 0 else [None] * size
        return list(map(_Draw, owner_ids, ids, tickets))

    def _offer(self, lists: Sequence[Ids]) -> list[Ticket]:
        requests = {next(self._requests): ids.tolist() for ids in lists}
        answer = self._owner.call("offer", requests=requests, num_tokens=None, publish=False)
        return [Ticket.from_text(text) for text in answer["tickets"]]


def _measured_by_itself(_: _Draw) -> float:
    raise AssertionError("kvlink's own transfers go through _Bench._pull")


def _mover_of(baseline: Baseline, thread: Executor, on_caller: Callable[[], bool]) -> _Mover:
    """Returns the mover of a baseline. It runs where kvlink's pulls run: on the caller's thread, or on `thread`.

    A copy that runs on another CPU than the caller's loses up to 15 % on a virtual machine, for any library.
    """

    def run(draw: _Draw) -> float:
        if on_caller():
            return baseline.run(draw.owner_ids, draw.ids)
        return thread.submit(baseline.run, draw.owner_ids, draw.ids).result()

    return _Mover(baseline.name, run)


@contextmanager
def _opened(transport: str, block_bytes: int, blocks: int, order: Fragmentation) -> Iterator[_Bench]:
    plain = transport.removeprefix("fault+")
    num_ways = 1 + num_baselines(transport)
    section = order.whole_runs(max(2 * blocks, -(-_LEAST_SECTION_BYTES // block_bytes)))
    geometry = Geometry(
        num_layers=1, total_heads=1, row_bytes=block_bytes, num_blocks=section * num_ways, block_tokens=1,
        planes_per_layer=1, dtype="uint8", model="bench",
    )  # fmt: skip
    layout = dense(geometry)
    with (
        owner_process(geometry, _SEED, transport, here=plain == "loopback") as owner,
        Worker(BlockPool.allocate(layout), "bench-reader", transports=transport) as worker,
        ThreadPoolExecutor(1) as threads,
    ):
        baselines = baselines_of(transport, owner, worker.pool)
        bare = [_mover_of(each, threads, lambda: bench.ran_inline) for each in baselines]
        assert 1 + len(bare) == num_ways
        bench = _Bench(owner, worker, [_Mover("kvlink", _measured_by_itself), *bare], order, blocks)
        yield bench
