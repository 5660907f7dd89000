# SPDX-License-Identifier: Apache-2.0
"""The hand-off of a whole request between two processes, through a coordinator, phase by phase.

offer: the prefill worker's call. claim: what the decode worker's call, which knows only the request id, takes
besides the transfer. plan, read, validate, settle: as the pull counts them. whole: offer, then from
the decode worker's call until it has the blocks.

Requests come one after the other, or at times of their own (arrivals.py). Then there is a phase late, until a slot
was free, and whole counts from the intended arrival: late, telling the prefill process to offer, and all the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count, cycle, islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvlink import BlockPool, Worker
from kvlink.errors import ConfigError
from kvlink.layout import dense

from .arrivals import LATE_US, Arrivals, open_loop
from .contents import Contents, Ids
from .draws import Order
from .models import BLOCK_TOKENS, geometry_of
from .processes import BenchError, OwnerSide, coordinator_process, owner_process
from .spread import quantiles_us

Row = dict[str, Any]

PHASES = ("offer", "claim", "plan", "read", "validate", "settle", "whole")

_POOL_BYTES = 2 << 30  # of each of the two pools, at most
_POOL_REQUESTS = 4
_SLOTS = 16  # requests under way at a time in an open loop, at most
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
) -> Iterator[Row]:
    """One row a phase. `tokens`: of every request, or of one after the other, those without room left out.

    `iters` None: what fits the size. `arrivals`: of each of `tokens`. Raises ConfigError, BenchError, TransferError.
    """
    given = [tokens] if isinstance(tokens, int) else list(tokens)
    kept = _fitting(given, model, tp)
    lengths = [given[index] for index in kept]
    largest, most = _blocks(max(lengths)), _most_blocks(model, tp)
    slots = min(most // largest, _SLOTS if arrivals else _POOL_REQUESTS)
    geometry = geometry_of(model, tp, largest * slots)
    with (
        coordinator_process() as coordinator,
        owner_process(geometry, _SEED, transport, coordinator, here=transport.endswith("loopback")) as owner,
        Worker(
            BlockPool.allocate(dense(geometry)), "bench-reader", coordinator=coordinator, transports=transport
        ) as worker,
    ):
        bench = _Bench(owner, worker, lengths)
        bench.run(2)  # connects and warms up
        bench.forget()
        common: Row = {"model": model, "tp": tp, "transport": transport}
        if not isinstance(tokens, int):
            common["left_out"] = len(given) - len(kept)
        if arrivals is None:
            mean_bytes = sum(map(_blocks, lengths)) * dense(geometry).block_bytes // len(lengths)
            bench.run(iters or max(_LEAST_ITERS, min(_RUN_BYTES // mean_bytes, _MOST_ITERS)))
        else:
            common |= {"arrivals": arrivals.name}
            common |= bench.run_open([arrivals.at_s[index] for index in kept], largest, slots)
        yield from bench.rows(common)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _most_blocks(model: str, tp: int) -> int:
    return _POOL_BYTES // dense(geometry_of(model, tp, 1)).block_bytes


def _fitting(lengths: Sequence[int], model: str, tp: int) -> list[int]:
    """Which of the requests have a prompt and find room. Raises ConfigError when none does."""
    most = _most_blocks(model, tp)
    if not any(lengths):
        raise ConfigError("none of these requests has a prompt")
    found = [index for index, tokens in enumerate(lengths) if 0 < _blocks(tokens) <= most]
    if not found:
        least = min(filter(None, lengths))
        gib = _blocks(least) * dense(geometry_of(model, tp, 1)).block_bytes / 2**30
        raise ConfigError(
            f"{least} tokens of {model} at TP {tp} are {gib:.1f} GiB, "
            f"and a pool of this benchmark has at most {_POOL_BYTES >> 30} GiB; ask for fewer tokens or more ranks"
        )
    return found


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
    def __init__(self, owner: OwnerSide, worker: Worker, lengths: Sequence[int]) -> None:
        self._owner, self._worker, self._lengths = owner, worker, lengths
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
        self._verified = self._wrong = 0

    def run(self, iters: int) -> None:
        """Hands over fresh requests, one after the other."""
        for number, tokens in enumerate(islice(cycle(self._lengths), iters)):
            request = self._request(tokens, self._num_blocks)
            check = number % _VERIFY_EVERY == 0 or number == iters - 1
            if check:
                self._contents.poison(self._worker.pool, request.ids)
            self._made.append(self._hand_over(request))
            if check:
                self._verify(request)

    def run_open(self, at_s: Sequence[float], largest: int, slots: int) -> Row:
        """Hands each request over when it comes. A slot has `largest` blocks; its last request is verified."""
        requests = [self._request(tokens, largest) for tokens in self._lengths]
        self._contents.poison(self._worker.pool, np.arange(self._num_blocks, dtype=np.uint32))
        made: dict[int, _HandOver] = {}
        last: dict[int, _Request] = {}

        def serve(slot: int, index: int) -> None:
            last.pop(slot, None)
            request = requests[index]._replace(ids=requests[index].ids + np.uint32(slot * largest))
            made[index] = self._hand_over(request)
            last[slot] = request

        served = open_loop(at_s, serve, slots)
        if not made:
            raise BenchError(f"none of {len(served)} requests was handed over: {served[0].error}")
        for index, done in sorted(made.items()):
            self._made.append(done._replace(us=(*done.us[:-1], served[index].took_us)))
            self._late_us.append(served[index].late_us)
        for request in last.values():
            self._verify(request)
        return {
            "slots": slots,
            "offered_per_s": len(at_s) / at_s[-1] if at_s[-1] else None,
            "started_late": sum(each.late_us > LATE_US for each in served),
            "failed": len(served) - len(made),
        }

    def rows(self, common: Row) -> Iterator[Row]:
        """What was measured. Tokens, bytes and operations are those of the median request."""
        phases = dict(zip(PHASES, zip(*(each.us for each in self._made), strict=True), strict=True))
        late = {"late": self._late_us} if self._late_us else {}
        for phase, us in (late | phases).items():
            yield {
                **common,
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
        num = _blocks(tokens)
        [owner_ids], [ids] = (Order().draw(self._rng, of, 1, num) for of in (self._num_blocks, within))
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
        us = (
            offer_us, took_us - stats.total_us, stats.plan_us, stats.read_us, stats.validate_us, stats.settle_us,
            offer_us + took_us,
        )  # fmt: skip
        return _HandOver(request.tokens, stats.num_bytes, stats.num_ops, us)

    def _verify(self, request: _Request) -> None:
        self._verified += 1
        self._wrong += not self._contents.equal(
            self._worker.pool, request.ids, request.owner_ids, request.tokens
        )


_LONG = {"model", "tp", "bytes", "ops", "iters", "offered_per_s", "slots", "left_out"}


def brief(row: Row) -> Row:
    """A row as it fits a screen; of intervals that of the median."""
    found = {
        name: value
        for name, value in row.items()
        if name not in _LONG and not name.endswith(("_low_us", "_high_us"))
    }
    ends = [row["p50_low_us"], row["p50_high_us"]]
    between = "–".join("" if end is None else f"{end:,.3g}" if end < 100 else f"{end:,.0f}" for end in ends)
    return found | {"p50_us_95": between}
