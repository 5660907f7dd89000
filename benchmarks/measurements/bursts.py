# SPDX-License-Identifier: Apache-2.0
"""Measures bursts of requests that are pulled together, as the workloads of public suites have them (suites.py).

The time of a burst is from the call of its first pull until the last of them has its bytes: all are started, then all
are waited for. As with those suites, the reader has the tickets before, and the coordinator takes no part. Every burst
has a new random block table at both ends. The limit is the fastest of the bare ways, which copy the same pieces.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from kvlink import Ticket, Worker
from kvlink.errors import KVLinkError

from ..harness.baselines import Copy, copies_from, memory_of, thread_counts
from ..harness.contents import Contents, Ids
from ..harness.owner import memory_for, pool_of, stacked
from ..harness.processes import BenchError, OwnerSide, owner_process
from ..harness.results import verified
from ..harness.statistics import histogram, quantiles_us
from ..workloads.suites import Point, Suite
from .rank_shares import End, pieces_of

Row = dict[str, Any]

_SEED = 20_261_128


class _Request(NamedTuple):
    """The pages of a request at both ends, by cache group."""

    name: str
    there: list[Ids]
    here: list[Ids]


def rows(suite: Suite, point: Point, transport: str, pool_bytes: int) -> Iterator[Row]:
    """Yields a row for each size of a burst, and one for the smallest for which pools of `pool_bytes` are too small.

    Raises BenchError and TransferError.
    """
    common: Row = {
        "suite": suite.name, "workload": point.workload, "transport": transport, "tokens": point.tokens,
        "page_tokens": point.page_tokens,
    }  # fmt: skip
    needed = {batch: stacked(point.geometries(batch))[-1].region_bytes[0] for batch in point.batches}
    fitting = [batch for batch in point.batches if needed[batch] <= pool_bytes]
    if fitting:
        with ExitStack() as stack:
            bursts = _Bursts(point, transport, fitting[-1], stack)
            for batch in fitting:
                yield common | {"requests": batch, **bursts.row(suite, batch)}
    for batch in point.batches[len(fitting) :][:1]:
        why = f"this and larger bursts need {needed[batch] / 2**30:.2g} GiB or more at each end (--pool-gib)"
        yield common | {"requests": batch, "why_not": why}


class _Bursts:
    """An owner and a reader whose caches have room for bursts of up to `largest` requests."""

    def __init__(self, point: Point, transport: str, largest: int, stack: ExitStack) -> None:
        self._point, geometries = point, point.geometries(largest)
        layouts, memory = stacked(geometries), memory_for(transport)
        self._pool = pool_of(layouts, memory)
        self._contents = [Contents(layout, _SEED + number) for number, layout in enumerate(layouts)]
        here = transport.endswith("loopback")
        self._owner: OwnerSide = stack.enter_context(
            owner_process(geometries, _SEED, transport, here=here, memory=memory)
        )
        self._worker = stack.enter_context(Worker(self._pool, "bench-reader", transports=transport))
        self._num_bytes = sum(group.layers * group.entries * group.entry_bytes for group in point.groups)
        name = transport.removeprefix("fault+")
        self._copies = copies_from(name, self._owner, thread_counts(self._num_bytes * largest))
        self._memory = memory_of(name, self._owner)
        self._names = map("burst-{}".format, count())
        self._rng = np.random.default_rng(_SEED)

    def row(self, suite: Suite, batch: int) -> Row:
        """Measures bursts of `batch` requests, in turns with the bare ways."""
        us: list[float] = []
        bare_us: dict[str, list[float]] = {name: [] for name in self._copies}
        wrong = failed = pieces = cpu_ns = 0
        for _ in range(suite.trials):
            for number in range(suite.warm_up + suite.bursts):
                requests = self._drawn(batch)
                took_us, cpu, right = self._pulled(requests)
                made = {name: self._copied(copy, requests) for name, copy in self._copies.items()}
                if number < suite.warm_up:
                    continue
                us.append(took_us)
                cpu_ns += cpu
                failed += took_us == math.inf
                wrong += not right and took_us < math.inf
                for name, (bare, moved) in made.items():
                    bare_us[name].append(bare)
                    pieces = moved
        gib, p50 = batch * self._num_bytes / 2**30, median_low(us)
        if failed == len(us):
            raise BenchError(f"none of {len(us)} bursts was pulled; see their messages above")
        row: Row = {
            "bytes": batch * self._num_bytes,
            "pieces": pieces,
            **quantiles_us(us),
            "histogram_us": histogram(us),
            "gib_per_s": gib / (p50 / 1e6),
            "cpu_s_per_gib": cpu_ns / 1e9 / gib / len(us),
            "iters": len(us),
            "failed": failed,
            **verified(wrong, len(us) - failed, len(us) - failed),
        }
        limits = {name: median_low(times) for name, times in bare_us.items()}
        if limits:
            limit = min(limits, key=limits.__getitem__)
            row |= {"limit": limit, "limit_us": limits[limit], "of_limit": limits[limit] / p50}
        return row

    def _drawn(self, batch: int) -> list[_Request]:
        """Draws a burst: the requests have parts of one permutation, so no page is of two of them."""
        tables = [
            [self._rng.permutation(group.num_blocks).astype(np.uint32) for group in self._pool.groups]
            for _ in range(2)
        ]
        found = []
        for number in range(batch):
            there, here = (
                [
                    np.ascontiguousarray(pages[number * group.pages : (number + 1) * group.pages])
                    for pages, group in zip(table, self._point.groups, strict=True)
                ]
                for table in tables
            )
            found.append(_Request(next(self._names), there, here))
        return found

    def _pulled(self, requests: Sequence[_Request]) -> tuple[float, int, bool]:
        """Pulls a burst. Returns µs, infinite if a pull failed, the CPU time of both processes, and if it is right."""
        offers = {each.name: _given([pages.tolist() for pages in each.there]) for each in requests}
        entries = _given([group.entries for group in self._point.groups])
        answer = self._owner.call("offer", requests=offers, num_tokens=entries, publish=False)
        tickets = [Ticket.from_text(text) for text in answer["tickets"]]
        self._poison(requests)
        cpu, start = self._cpu_ns(), time.perf_counter_ns()
        try:
            pulls = [
                self._worker.pull(ticket, into=_given(each.here))
                for ticket, each in zip(tickets, requests, strict=True)
            ]
            for pull in pulls:
                pull.wait()
        except KVLinkError:
            return math.inf, 0, False
        took_us = (time.perf_counter_ns() - start) / 1000
        return took_us, self._cpu_ns() - cpu, self._landed(requests)

    def _copied(self, copy: Copy, requests: Sequence[_Request]) -> tuple[float, int]:
        """Moves a burst by bare calls. Returns µs and the number of pieces. Raises BenchError for wrong bytes."""
        to = self._pool.regions[0].address
        pieces = np.concatenate(
            [
                pieces_of(
                    End(layout, layout.layers, there, self._memory.base), End(layout, layout.layers, here, to),
                    (0, 1), group.entries,
                )
                for each in requests
                for layout, group, there, here in zip(
                    self._pool.groups, self._point.groups, each.there, each.here, strict=True
                )
            ]
        )  # fmt: skip
        self._poison(requests)
        us = copy(pieces) / 1000
        if not self._landed(requests):
            raise BenchError(
                "bare calls copied other bytes than requested, so the limit is invalid; report this"
            )
        return us, len(pieces)

    def _poison(self, requests: Sequence[_Request]) -> None:
        for each in requests:
            for contents, pages in zip(self._contents, each.here, strict=True):
                contents.poison(self._pool, pages)

    def _landed(self, requests: Sequence[_Request]) -> bool:
        return all(
            contents.equal(self._pool, here, there, group.entries)
            for each in requests
            for contents, here, there, group in zip(
                self._contents, each.here, each.there, self._point.groups, strict=True
            )
        )

    def _cpu_ns(self) -> int:
        return time.process_time_ns() + self._owner.cpu_ns()


def _given(of_groups: list[Any]) -> Any:
    """Returns an argument of `offer` or `pull`: one of each cache group, or of the only one."""
    return of_groups if len(of_groups) > 1 else of_groups[0]
