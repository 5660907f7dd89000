# SPDX-License-Identifier: Apache-2.0
"""The hand-off of a whole request between two processes, through a coordinator, phase by phase.

offer: the prefill worker's call. claim: what the decode worker's call, which knows only the request id, takes
besides the transfer. plan, validate, settle: as the pull counts them. post: handing the reads to the transport, the
lanes' times added up; wire: the rest of the read. whole: offer, then from the decode worker's call until it has the
blocks; nothing is flushed, since the pool is in host memory. overhead: what of each request's whole is not wire.

Requests come one after the other, or as soon as one of several slots is free, or at times of their own (arrivals.py).
In the last case there is a phase late, until a slot was free, and whole counts from the intended arrival: late, telling
the prefill process to offer, and all the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvlink import BlockPool, Worker
from kvlink.layout import dense

from .allocator import order_of
from .arrivals import LATE_US, Arrivals, Served, open_loop
from .cache import Cache
from .contents import Contents, Ids
from .draws import Fragmentation
from .models import BLOCK_TOKENS
from .processes import BenchError, OwnerSide, coordinator_process, owner_process
from .spread import quantiles_us, with_median_interval

Row = dict[str, Any]

PHASES = ("offer", "claim", "plan", "post", "wire", "validate", "settle", "whole")
OVERHEAD = "overhead"

_POOL_REQUESTS = 4
_SLOTS = 16  # requests under way at a time in an open loop, where nothing else is asked for
_RUN_BYTES = 8 << 30
_LEAST_ITERS, _MOST_ITERS = 10, 200
_VERIFY_EVERY = 4  # besides the first and the last
_SEED = 20_250_102


def rows(
    model: str,
    tokens: int | Sequence[int],
    transport: str,
    tp: int = 1,
    iters: int | None = None,
    arrivals: Arrivals | None = None,
    order: str = "random",
    trace: str = "",
    block_tokens: int = BLOCK_TOKENS,
    prefill_ms: float = 0.0,
    slots: int | None = None,
) -> Iterator[Row]:
    """One row a phase, then the overhead. `tokens`: of every request, or of one after the other, those without room
    left out.

    `iters` None: what fits the size. `arrivals`: of each of `tokens`. `order`, `trace`: as order_of reads them.
    `prefill_ms`: of a request, before its move; 0: say nothing of TTFT. `slots`: requests under way at a time, if there
    is room for as many; None: one, or 16 with `arrivals`. Raises ConfigError, BenchError, TransferError.
    """
    given = [tokens] if isinstance(tokens, int) else list(tokens)
    cache = Cache(model, tp, block_tokens)
    kept = cache.fitting(given)
    lengths = [given[index] for index in kept]
    blocks = order_of(order, cache.blocks(max(lengths)), trace)
    largest = blocks.whole_runs(cache.blocks(max(lengths)))
    room = max(1, cache.most_blocks() // largest)
    slots = min(room, slots or (_SLOTS if arrivals else 1))
    geometry = cache.geometry(largest * max(slots, min(room, _POOL_REQUESTS)))
    with (
        coordinator_process() as coordinator,
        owner_process(geometry, _SEED, transport, coordinator, here=transport.endswith("loopback")) as owner,
        Worker(
            BlockPool.allocate(dense(geometry)), "bench-reader", coordinator=coordinator, transports=transport
        ) as worker,
    ):
        bench = _Bench(owner, worker, cache, lengths, blocks)
        bench.run(2)  # connects and warms up
        bench.forget()
        common: Row = {
            "model": model, "tp": tp, "block_tokens": block_tokens, "transport": transport, "order": order
        }  # fmt: skip
        if not isinstance(tokens, int):
            common["left_out"] = len(given) - len(kept)
        mean_bytes = sum(map(cache.blocks, lengths)) * dense(geometry).block_bytes // len(lengths)
        iters = iters or max(_LEAST_ITERS, min(_RUN_BYTES // mean_bytes, _MOST_ITERS))
        if arrivals is not None:
            common |= {"arrivals": arrivals.name}
            common |= bench.run_open([arrivals.at_s[index] for index in kept], largest, slots)
        elif slots > 1:
            common |= bench.run_together(max(iters, slots), largest, slots)
        else:
            bench.run(iters)
        yield from bench.rows(common, prefill_ms * 1e3)


class _Request(NamedTuple):
    """Blocks at both ends; the owner knows its part."""

    request_id: str
    tokens: int
    owner_ids: Ids
    ids: Ids


class _HandOver(NamedTuple):
    """One that was made. `us`: phase by phase."""

    tokens: int
    num_bytes: int
    num_ops: int
    us: tuple[float, ...]


class _Bench:
    def __init__(
        self, owner: OwnerSide, worker: Worker, cache: Cache, lengths: Sequence[int], order: Fragmentation
    ) -> None:
        self._owner, self._worker, self._cache = owner, worker, cache
        self._lengths, self._order = lengths, order
        self._asking = threading.Lock()  # for one answer at a time of the owner
        self._contents = Contents(worker.pool.layout, _SEED)
        self._num_blocks = worker.pool.layout.num_blocks
        self._rng = np.random.default_rng(_SEED)
        self._names = map("migrate-{}".format, count())
        self.forget()

    def forget(self) -> None:
        """Drops what was measured so far."""
        self._made: list[_HandOver] = []
        self._late_us: list[float] = []
        self._verified = self._wrong = self._cpu_ns = 0

    def run(self, iters: int) -> None:
        """Hands over fresh requests, one after the other."""
        for number, tokens in enumerate(islice(cycle(self._lengths), iters)):
            request = self._request(tokens, self._num_blocks)
            check = number % _VERIFY_EVERY == 0 or number == iters - 1
            if check:
                self._contents.poison(self._worker.pool, request.ids)
            with self._counted():
                self._made.append(self._hand_over(request))
            if check:
                self._verify(request)

    def run_open(self, at_s: Sequence[float], largest: int, slots: int) -> Row:
        """Hands each request over when it comes."""
        served, made = self._run_in_slots(at_s, self._lengths, largest, slots)
        for index, done in sorted(made.items()):
            self._made.append(done._replace(us=(*done.us[:-1], served[index].took_us)))
            self._late_us.append(served[index].late_us)
        return {
            "slots": slots,
            "offered_per_s": len(at_s) / at_s[-1] if at_s[-1] else None,
            "started_late": sum(each.late_us > LATE_US for each in served),
            "failed": len(served) - len(made),
        }

    def run_together(self, iters: int, largest: int, slots: int) -> Row:
        """Hands fresh requests over, a slot's next one as soon as its last is there."""
        lengths = list(islice(cycle(self._lengths), iters))
        served, made = self._run_in_slots([0.0] * iters, lengths, largest, slots)
        self._made += made.values()
        took_s = (max(each.took_us for each in served) - min(each.late_us for each in served)) / 1e6
        return {"slots": slots, "made_per_s": len(made) / took_s, "failed": len(served) - len(made)}

    def _run_in_slots(
        self, at_s: Sequence[float], lengths: Sequence[int], largest: int, slots: int
    ) -> tuple[list[Served], dict[int, _HandOver]]:
        """What became of each request, and those that were made by their index. A slot has `largest` blocks; its last
        request is verified.
        """
        requests = [self._request(tokens, largest) for tokens in lengths]
        self._contents.poison(self._worker.pool, np.arange(self._num_blocks, dtype=np.uint32))
        made: dict[int, _HandOver] = {}
        last: dict[int, _Request] = {}

        def serve(slot: int, index: int) -> None:
            last.pop(slot, None)
            request = requests[index]._replace(ids=requests[index].ids + np.uint32(slot * largest))
            made[index] = self._hand_over(request)
            last[slot] = request

        with self._counted():
            served = open_loop(at_s, serve, slots)
        if not made:
            raise BenchError(f"none of {len(served)} requests was handed over: {served[0].error}")
        for request in last.values():
            self._verify(request)
        return served, made

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Adds the CPU time of both sides, all threads of them."""
        start = time.process_time_ns() + self._owner.cpu_ns()
        yield
        self._cpu_ns += time.process_time_ns() + self._owner.cpu_ns() - start

    def rows(self, common: Row, prefill_us: float) -> Iterator[Row]:
        """What was measured. Tokens, bytes and operations are those of the median request; CPU time is of them all,
        without the coordinator's.
        """
        gib = sum(each.num_bytes for each in self._made) / 2**30
        common = common | {"cpu_s_per_gib": self._cpu_ns / 1e9 / gib}
        phases = dict(zip(PHASES, zip(*(each.us for each in self._made), strict=True), strict=True))
        late = {"late": self._late_us} if self._late_us else {}
        over = [whole - wire for whole, wire in zip(phases["whole"], phases["wire"], strict=True)]
        ttft_us = prefill_us + median(phases["whole"])
        for phase, us in (late | phases | {OVERHEAD: over}).items():
            yield {
                **common,
                **({"of_ttft": median(us) / ttft_us} if prefill_us else {}),
                "tokens": round(median(each.tokens for each in self._made)),
                "phase": phase,
                **quantiles_us(us),
                "bytes": round(median(each.num_bytes for each in self._made)),
                "ops": round(median(each.num_ops for each in self._made)),
                "iters": len(us),
                "verified": self._verified > 0 and self._wrong == 0,
            }

    def _request(self, tokens: int, within: int) -> _Request:
        """Into some of the first `within` blocks."""
        num = self._cache.blocks(tokens)
        [owner_ids], [ids] = (self._order.draw(self._rng, of, 1, num) for of in (self._num_blocks, within))
        request = _Request(next(self._names), tokens, owner_ids, ids)
        self._owner.call("hold", request_id=request.request_id, ids=owner_ids.tolist(), num_tokens=tokens)
        return request

    def _hand_over(self, request: _Request) -> _HandOver:
        with self._asking:
            answer = self._owner.call("offer_held", request_id=request.request_id)
        start = time.perf_counter_ns()
        pull = self._worker.pull(request.request_id, into=request.ids)
        pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        stats = pull.stats
        if not stats.settled:
            raise BenchError(f"{pull!r} returned before it was settled")
        [offer_us] = answer["offer_us"]
        post_us = min(stats.post_us, stats.read_us)
        us = (
            offer_us, took_us - stats.total_us, stats.plan_us, post_us, stats.read_us - post_us, stats.validate_us,
            stats.settle_us, offer_us + took_us,
        )  # fmt: skip
        return _HandOver(request.tokens, stats.num_bytes, stats.num_ops, us)

    def _verify(self, request: _Request) -> None:
        self._verified += 1
        self._wrong += not self._contents.equal(
            self._worker.pool, request.ids, request.owner_ids, request.tokens
        )


_LONG = {
    "model", "tp", "block_tokens", "order", "bytes", "ops", "iters", "cpu_s_per_gib", "offered_per_s", "slots",
    "left_out",
}  # fmt: skip


def brief(row: Row) -> Row:
    """A row as it fits a screen."""
    return with_median_interval(row, _LONG)
