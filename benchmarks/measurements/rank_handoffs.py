# SPDX-License-Identifier: Apache-2.0
"""Makes handoffs of requests between all ranks of two sides, times each phase, and compares every byte."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, cycle, islice
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvlink import Worker
from kvlink.layout import num_seats

from ..harness.block_draws import Fragmentation
from ..harness.contents import Contents, Ids
from ..harness.processes import BenchError
from ..harness.quantiles import quantiles_us
from ..workloads.arrivals import LATE_US, Served, open_loop
from ..workloads.block_budget import Cache
from .rank_shares import Baselines, Owner, Request

Row = dict[str, Any]

PHASES = ("offer", "claim", "plan", "post", "wire", "validate", "settle", "whole")
OVERHEAD, LIMIT = "overhead", "limit"

SEED = 20_250_102
"""The seed of the contents at both sides."""

_VERIFY_EVERY = 4  # besides the first and the last


class _Handoff(NamedTuple):
    """A completed handoff, with the time of each phase in `us`."""

    tokens: int
    num_bytes: int
    num_ops: int
    us: tuple[float, ...]


class Bench:
    """Makes handoffs, on one thread except for requests in flight together."""

    def __init__(
        self,
        owners: Sequence[Owner],
        workers: Sequence[Worker],
        cache: Cache,
        lengths: Sequence[int],
        order: Fragmentation,
    ) -> None:
        self._owners = [(owner.side, num_seats(owner.layout, workers[0].pool.layout)) for owner in owners]
        self._workers, self._cache = workers, cache
        self._lengths, self._order = lengths, order
        self._asking = threading.Lock()  # one request to the owners at a time
        self._contents = [Contents(worker.pool.layout, SEED) for worker in workers]
        self._num_blocks = workers[0].pool.layout.num_blocks
        self._rng = np.random.default_rng(SEED)
        self._names = map("migrate-{}".format, count())
        self.forget()

    def forget(self) -> None:
        """Drops the measurements so far."""
        self._made: list[_Handoff] = []
        self._late_us: list[float] = []
        self._limits_us: dict[str, list[float]] = {}
        self._verified = self._wrong = self._cpu_ns = 0

    def run(self, iters: int, baselines: Baselines) -> None:
        """Hands off fresh requests, one after the other, in turns with bare calls."""
        for number, tokens in enumerate(islice(cycle(self._lengths), iters)):
            check = number % _VERIFY_EVERY == 0 or number == iters - 1
            request = self._request(tokens, self._num_blocks)
            if check:
                self._poison(request.ids)
            with self._counted():
                self._made.append(self._handoff(request))
            if check:
                self._verify(request)
            for name in baselines.names:
                self._limit(baselines, name, tokens, check)

    def _limit(self, baselines: Baselines, name: str, tokens: int, check: bool) -> None:
        request = self._draw(tokens, self._num_blocks)
        if check:
            self._poison(request.ids)
        self._limits_us.setdefault(name, []).append(baselines.run(name, request))
        if check and not self._landed(request):
            raise BenchError(
                f"{name} copied other bytes than requested, so the limit is invalid; report this"
            )

    def run_open(self, at_s: Sequence[float], largest: int, slots: int) -> Row:
        """Hands off each request at its arrival."""
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
        """Hands off fresh requests, a slot's next one as soon as its last one is complete."""
        lengths = list(islice(cycle(self._lengths), iters))
        served, made = self._run_in_slots([0.0] * iters, lengths, largest, slots)
        self._made += made.values()
        took_s = (max(each.took_us for each in served) - min(each.late_us for each in served)) / 1e6
        return {"slots": slots, "made_per_s": len(made) / took_s, "failed": len(served) - len(made)}

    def _run_in_slots(
        self, at_s: Sequence[float], lengths: Sequence[int], largest: int, slots: int
    ) -> tuple[list[Served], dict[int, _Handoff]]:
        """Returns the result of each request, and the completed handoffs by index.

        A slot has `largest` blocks; its last request is verified.
        """
        requests = [self._request(tokens, largest) for tokens in lengths]
        self._poison(np.arange(self._num_blocks, dtype=np.uint32))
        made: dict[int, _Handoff] = {}
        last: dict[int, Request] = {}

        def serve(slot: int, index: int) -> None:
            last.pop(slot, None)
            request = requests[index]._replace(ids=requests[index].ids + np.uint32(slot * largest))
            made[index] = self._handoff(request)
            last[slot] = request

        with self._counted():
            served = open_loop(at_s, serve, slots)
        if not made:
            raise BenchError(f"none of {len(served)} requests was handed off: {served[0].error}")
        for request in last.values():
            self._verify(request)
        return served, made

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Adds the CPU time of all threads of both sides."""
        start = self._all_cpu_ns()
        yield
        self._cpu_ns += self._all_cpu_ns() - start

    def _all_cpu_ns(self) -> int:
        return time.process_time_ns() + sum(owner.cpu_ns() for owner, _ in self._owners)

    def rows(self, common: Row, prefill_us: float) -> Iterator[Row]:
        """Yields the measured rows.

        Tokens, bytes and operations are those of the median request. CPU time is that of all requests, without the
        coordinator's.
        """
        gib = sum(each.num_bytes for each in self._made) / 2**30
        common = common | {"cpu_s_per_gib": self._cpu_ns / 1e9 / gib}
        phases = dict(zip(PHASES, zip(*(each.us for each in self._made), strict=True), strict=True))
        late = {"late": self._late_us} if self._late_us else {}
        over = [whole - wire for whole, wire in zip(phases["whole"], phases["wire"], strict=True)]
        ttft_us = prefill_us + median(phases["whole"])
        limit: dict[str, list[float]] = {}
        if self._limits_us:
            name, least = min(self._limits_us.items(), key=lambda each: median(each[1]))
            limit = {LIMIT: least}
            common |= {LIMIT: name, "of_limit": median(least) / median(phases["whole"])}
        for phase, us in (late | phases | {OVERHEAD: over} | limit).items():
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

    def _draw(self, tokens: int, within: int, request_id: str = "") -> Request:
        """Draws a request into some of the first `within` blocks."""
        num = self._cache.blocks(tokens)
        [owner_ids], [ids] = (self._order.draw(self._rng, of, 1, num) for of in (self._num_blocks, within))
        return Request(request_id, owner_ids, ids, tokens)

    def _request(self, tokens: int, within: int) -> Request:
        """Makes a request and tells owners their parts. A claim waits for all ranks' offers, even without a reader."""
        request = self._draw(tokens, within, next(self._names))
        for owner, seats in self._owners:
            owner.call(
                "hold",
                request_id=request.request_id,
                ids=request.owner_ids.tolist(),
                num_tokens=tokens,
                readers=max(1, seats),
            )
        return request

    def _handoff(self, request: Request) -> _Handoff:
        request_id = request.request_id
        with self._asking:
            answers = [owner.call("offer_held", request_id=request_id) for owner, _ in self._owners]
        start = time.perf_counter_ns()
        pulls = [worker.pull(request_id, into=request.ids) for worker in self._workers]
        for pull in pulls:
            pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        with self._asking:
            for owner, seats in self._owners:
                if not seats:
                    owner.call("release", request_id=request_id)
        every = [pull.stats for pull in pulls]
        if not all(stats.settled for stats in every):
            raise BenchError(f"request {request_id}: a pull returned before it was settled: {pulls}")
        stats = max(every, key=lambda each: each.total_us)
        offer_us = max(us for answer in answers for us in answer["offer_us"])
        post_us = min(stats.post_us, stats.read_us)
        us = (
            offer_us, took_us - stats.total_us, stats.plan_us, post_us, stats.read_us - post_us, stats.validate_us,
            stats.settle_us, offer_us + took_us,
        )  # fmt: skip
        num_bytes, num_ops = sum(each.num_bytes for each in every), sum(each.num_ops for each in every)
        return _Handoff(request.tokens, num_bytes, num_ops, us)

    def _poison(self, ids: Ids) -> None:
        for worker, contents in zip(self._workers, self._contents, strict=True):
            contents.poison(worker.pool, ids)

    def _verify(self, request: Request) -> None:
        self._verified += 1
        self._wrong += not self._landed(request)

    def _landed(self, request: Request) -> bool:
        """Returns whether every byte is right at every rank of decode."""
        return all(
            contents.equal(worker.pool, request.ids, request.owner_ids, request.tokens)
            for worker, contents in zip(self._workers, self._contents, strict=True)
        )
