# SPDX-License-Identifier: Apache-2.0
"""Makes handoffs of requests between all ranks of two sides, times each phase, and compares every byte."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from itertools import count, cycle, islice
from statistics import median, median_low
from typing import Any, NamedTuple

import numpy as np

from kvlink import Worker
from kvlink.control import CoordinatorClient
from kvlink.errors import KVLinkError
from kvlink.layout import num_seats

from ..harness.block_draws import Order
from ..harness.contents import Contents, Ids
from ..harness.processes import BenchError
from ..harness.results import verified
from ..harness.statistics import histogram, quantiles_us
from ..workloads.arrivals import LATE_US, Served, is_unstable, open_loop
from ..workloads.block_budget import Cache
from .decode_loop import Loop, Step, times_us
from .rank_shares import Baselines, Owner, Request

Row = dict[str, Any]

PARTS = ("late", "offer", "claim", "plan", "post", "wire", "validate", "settle")
"""The parts of a handoff that follow each other. The first has a length only in an open loop."""

SEED = 20_250_102
"""The seed of the contents at both sides."""

_CHECK_LIMITS_EVERY = 4  # of the bare calls, besides the first and the last
_CLAIMS = 25
_BESIDE_STEPS, _BESIDE_HANDOFFS, _MOST_BATCHES = 50, 48, 30
_PUBLISHED_S = 0.01  # after an offer, when the coordinator has it
_CLAIM_S = 10.0


class _Handoff(NamedTuple):
    """A completed handoff, with the time of each part in `us`, of which the first is how late it began."""

    tokens: int
    num_bytes: int
    num_ops: int
    us: tuple[float, ...]
    whole_us: float


class Bench:
    """Makes handoffs, on one thread except for requests in flight together."""

    def __init__(
        self,
        prefills: Sequence[Sequence[Owner]],
        workers: Sequence[Worker],
        cache: Cache,
        lengths: Sequence[int],
        order: Order,
    ) -> None:
        self._prefills = [
            [(owner.side, num_seats(owner.layout, workers[0].pool.layout)) for owner in owners]
            for owners in prefills
        ]
        self._workers, self._cache = workers, cache
        self._lengths, self._order = lengths, order
        self._asking = threading.Lock()  # one request to the owners at a time
        self._contents = [Contents(worker.pool.layout, SEED) for worker in workers]
        self._num_blocks = workers[0].pool.layout.num_blocks
        self._rng = np.random.default_rng(SEED)
        self._names = count()
        self._forget()

    def _forget(self) -> None:
        self._made: list[_Handoff] = []
        self._limits_us: dict[str, list[float]] = {}
        self._compared = self._wrong = self._failed = self._cpu_ns = 0

    def warm_up(self, baselines: Baselines) -> Row:
        """Connects. Returns how long the first handoff from each prefill took, and the second."""
        whole_us = []
        for _ in range(2):
            self.run(len(self._prefills), baselines)
            if self._failed:
                raise BenchError("a handoff failed while the ranks connected; see its messages above")
            whole_us.append(max(each.whole_us for each in self._made))
            self._forget()
        return {"first_us": whole_us[0], "second_us": whole_us[1]}

    def run(self, iters: int, baselines: Baselines) -> Row:
        """Hands off fresh requests, one after the other, in turns with bare calls."""
        for number, tokens in enumerate(islice(cycle(self._lengths), iters)):
            request = self._request(tokens, self._num_blocks)
            self._poison(request.ids)
            try:
                with self._counted():
                    self._made.append(self._handoff(request))
                self._verify(request)
            except KVLinkError:
                self._failed += 1
            check = number % _CHECK_LIMITS_EVERY == 0 or number == iters - 1
            for name in baselines.names:
                self._limit(baselines, name, tokens, check)
        if not self._made:
            raise BenchError(f"none of {iters} requests was handed off; see their messages above")
        return {}

    def claim_parts(self, coordinator: str) -> Row:
        """Measures what a claim consists of, with handoffs in turns: at once after the offer, and long after it.

        publish is the wait for the coordinator to have the offer, rpc the claims alone, one for each rank of decode, by
        a bare client, and worker the rest: the way to the control thread and back, the check of the tickets and the
        start of the pulls.
        """
        at_once: list[float] = []
        later: list[float] = []
        alone: list[float] = []
        with closing(asyncio.new_event_loop()) as loop:
            client = loop.run_until_complete(_client_of(coordinator))
            for _ in range(_CLAIMS):
                for us, pause_s in ((at_once, 0.0), (later, _PUBLISHED_S)):
                    handoff = self._handoff(self._request(self._lengths[0], self._num_blocks), pause_s)
                    us.append(handoff.us[PARTS.index("claim")])
                request = self._request(self._lengths[0], self._num_blocks)
                owners = self._prefills[request.prefill]
                for owner, _ in owners:
                    owner.call("offer_held", request_id=request.request_id)
                time.sleep(_PUBLISHED_S)
                start = time.perf_counter_ns()
                loop.run_until_complete(_claims(client, request.request_id, len(self._workers)))
                alone.append((time.perf_counter_ns() - start) / 1000)
                for owner, _ in owners:
                    owner.call("release", request_id=request.request_id)
            loop.run_until_complete(client.close())
        whole, known, bare = map(median, (at_once, later, alone))
        parts = {"publish": max(0.0, whole - known), "rpc": bare, "worker": max(0.0, known - bare)}
        return {"claim_parts_us": parts, "of_bare_claim": whole / bare}

    def _limit(self, baselines: Baselines, name: str, tokens: int, check: bool) -> None:
        request = self._draw(tokens, self._num_blocks)
        if check:
            self._poison(request.ids)
        self._limits_us.setdefault(name, []).append(baselines.run(name, request))
        if check and not self._landed(request):
            raise BenchError(
                f"{name} copied other bytes than requested, so the limit is invalid; report this"
            )

    def run_open(self, at_s: Sequence[float], largest: int, slots: int, slo_us: float) -> Row:
        """Hands off each request at its arrival."""
        served = self._run_in_slots(at_s, self._lengths, largest, slots)
        lasts_s = (
            max((at + each.took_us / 1e6 for at, each in zip(at_s, served, strict=True)), default=0.0)
            - at_s[0]
        )
        good = sum(each.error is None and each.took_us <= slo_us for each in served)
        return {
            "slots": slots,
            "offered_per_s": len(at_s) / at_s[-1] if at_s[-1] else None,
            "achieved_per_s": len(self._made) / lasts_s,
            "unstable": is_unstable(served),
            "started_late": sum(each.late_us > LATE_US for each in served),
        } | ({"slo_ms": slo_us / 1e3, "goodput_per_s": good / lasts_s} if math.isfinite(slo_us) else {})

    def run_together(self, iters: int, largest: int, slots: int) -> Row:
        """Hands off fresh requests, a slot's next one as soon as its last one is complete."""
        lengths = list(islice(cycle(self._lengths), iters))
        served = self._run_in_slots([0.0] * iters, lengths, largest, slots, closed=True)
        took_s = (max(each.took_us for each in served) - min(each.late_us for each in served)) / 1e6
        return {"slots": slots, "achieved_per_s": len(self._made) / took_s}

    def run_beside(self, step: Step, largest: int) -> Row:
        """Hands off batches of fresh requests, one request after the other, in turns alone and beside a loop.

        Each request of a batch has `largest` blocks of its own, so all are compared when the loop has ended. Times are
        those of handoffs and of steps, beside each other and alone.
        """
        alone_us: list[float] = []
        beside_us: list[float] = []
        steps_alone_us: list[float] = []
        steps_us: list[float] = []
        self._forget()
        for _ in range(_MOST_BATCHES):
            alone_us += self._batch(largest, nullcontext())
            loop = Loop(step)
            beside_us += self._batch(largest, loop)
            steps_us += loop.times_us
            steps_alone_us += times_us(step, max(1, len(loop.times_us)))
            if len(steps_us) >= _BESIDE_STEPS and len(beside_us) >= _BESIDE_HANDOFFS:
                break
        if not steps_us or math.inf in (median_low(alone_us), median_low(beside_us)):
            raise BenchError("no step of the loop, or too few handoffs, ended beside each other")
        return {
            **quantiles_us(beside_us),
            "alone_us": median_low(alone_us),
            "ratio": median_low(beside_us) / median_low(alone_us),
            "step_us": median_low(steps_us),
            "step_alone_us": median_low(steps_alone_us),
            "step_ratio": median_low(steps_us) / median_low(steps_alone_us),
            "histogram_us": histogram(beside_us),
            "iters": len(beside_us),
            "steps": len(steps_us),
            "failed": self._failed,
            **verified(self._wrong, self._compared, len(alone_us) + len(beside_us) - self._failed),
        }

    def _batch(self, largest: int, beside: AbstractContextManager[object]) -> list[float]:
        """Makes the handoffs of a batch within a context, and then compares them. Returns how long each took."""
        lengths = islice(cycle(self._lengths), self._num_blocks // largest)
        requests = [
            request._replace(ids=request.ids + np.uint32(place * largest))
            for place, request in enumerate(self._request(tokens, largest) for tokens in lengths)
        ]
        self._poison(np.arange(self._num_blocks, dtype=np.uint32))
        with beside:
            took_us = [self._took_us(request) for request in requests]
        for request, us in zip(requests, took_us, strict=True):
            if math.isfinite(us):
                self._verify(request)
        return took_us

    def _took_us(self, request: Request) -> float:
        try:
            return self._handoff(request).whole_us
        except KVLinkError:
            self._failed += 1
            return math.inf

    def _run_in_slots(
        self, at_s: Sequence[float], lengths: Sequence[int], largest: int, slots: int, closed: bool = False
    ) -> list[Served]:
        """Returns the result of each request.

        Each has `largest` blocks of its own while there are some left, then the ones of an earlier request, which is
        not compared. In a closed loop nobody is late.
        """
        requests = [self._request(tokens, largest) for tokens in lengths]
        self._poison(np.arange(self._num_blocks, dtype=np.uint32))
        places = deque(range(self._num_blocks // largest))
        made: dict[int, _Handoff] = {}
        landed: dict[int, Request] = {}

        def serve(slot: int, index: int) -> None:
            place = places.popleft()  # never empty: there are as many as slots
            landed.pop(place, None)
            request = requests[index]._replace(ids=requests[index].ids + np.uint32(place * largest))
            try:
                made[index] = self._handoff(request)
                landed[place] = request
            finally:
                places.append(place)

        with self._counted():
            served = open_loop(at_s, serve, slots)
        if not made:
            raise BenchError(f"none of {len(served)} requests was handed off: {served[0].error}")
        for index, done in sorted(made.items()):
            late_us = 0.0 if closed else served[index].late_us
            whole_us = done.whole_us if closed else served[index].took_us
            self._made.append(done._replace(us=(late_us, *done.us[1:]), whole_us=whole_us))
        self._failed += len(served) - len(made)
        for request in landed.values():
            self._verify(request)
        return served

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Adds the CPU time of all threads of both sides."""
        start = self._all_cpu_ns()
        yield
        self._cpu_ns += self._all_cpu_ns() - start

    def _all_cpu_ns(self) -> int:
        return time.process_time_ns() + sum(
            owner.cpu_ns() for owners in self._prefills for owner, _ in owners
        )

    def row(self, prefill_us: float) -> Row:
        """Returns the measured row: times of the whole, where a failed request is infinitely long, and of its parts.

        Parts are those of completed requests; tokens, bytes and operations those of the median one. CPU time is that of
        all requests, without the coordinator's.
        """
        gib = sum(each.num_bytes for each in self._made) / 2**30
        parts = dict(zip(PARTS, zip(*(each.us for each in self._made), strict=True), strict=True))
        whole = [each.whole_us for each in self._made] + [math.inf] * self._failed
        over = [each.whole_us - each.us[PARTS.index("wire")] for each in self._made]
        p50 = median(whole)
        row: Row = {
            "tokens": round(median(each.tokens for each in self._made)),
            **quantiles_us(whole),
            **{f"{part}_us": median(us) for part, us in parts.items()},
            "overhead_us": median(over),
            "parts": {part: quantiles_us(us) for part, us in parts.items()},
            "histogram_us": histogram(whole),
            "cpu_s_per_gib": self._cpu_ns / 1e9 / gib,
            "bytes": round(median(each.num_bytes for each in self._made)),
            "ops": round(median(each.num_ops for each in self._made)),
            "iters": len(whole),
            "failed": self._failed,
            **verified(self._wrong, self._compared, len(self._made)),
        }
        if self._limits_us:
            medians = {name: median(us) for name, us in self._limits_us.items()}
            limit = min(medians, key=lambda name: medians[name])
            row |= {"limit": limit, "limit_us": medians[limit], "of_limit": medians[limit] / p50}
        return row | ({"of_ttft": p50 / (prefill_us + p50)} if prefill_us else {})

    def _draw(self, tokens: int, within: int, request_id: str = "", prefill: int = 0) -> Request:
        """Draws a request into some of the first `within` blocks."""
        num = self._cache.blocks(tokens)
        [owner_ids], [ids] = (self._order.draw(self._rng, of, [num]) for of in (self._num_blocks, within))
        return Request(request_id, owner_ids, ids, tokens, prefill)

    def _request(self, tokens: int, within: int) -> Request:
        """Makes a request and tells owners their parts. A claim waits for all ranks' offers, even without a reader."""
        number = next(self._names)
        request = self._draw(tokens, within, f"migrate-{number}", number % len(self._prefills))
        owner_ids, kept = self._offered(request)
        for owner, seats in self._prefills[request.prefill]:
            owner.call(
                "hold",
                request_id=request.request_id,
                ids=owner_ids,
                num_tokens=kept,
                readers=max(1, seats),
            )
        return request

    def _handoff(self, request: Request, pause_s: float = 0.0) -> _Handoff:
        request_id, owners = request.request_id, self._prefills[request.prefill]
        with self._asking:
            answers = [owner.call("offer_held", request_id=request_id) for owner, _ in owners]
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter_ns()
        into = self._into(request)
        pulls = [worker.pull(request_id, into=into) for worker in self._workers]
        for pull in pulls:
            pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        with self._asking:
            for owner, seats in owners:
                if not seats:
                    owner.call("release", request_id=request_id)
        every = [pull.stats for pull in pulls]
        if not all(stats.settled for stats in every):
            raise BenchError(f"request {request_id}: a pull returned before it was settled: {pulls}")
        stats = max(every, key=lambda each: each.total_us)
        offer_us = max(us for answer in answers for us in answer["offer_us"])
        post_us = min(stats.post_us, stats.read_us)
        us = (
            0.0, offer_us, took_us - stats.total_us, stats.plan_us, post_us, stats.read_us - post_us, stats.validate_us,
            stats.settle_us,
        )  # fmt: skip
        num_bytes, num_ops = sum(each.num_bytes for each in every), sum(each.num_ops for each in every)
        return _Handoff(request.tokens, num_bytes, num_ops, us, offer_us + took_us)

    def _offered(self, request: Request) -> tuple[Any, Any]:
        """Returns what the owners offer: block ids and the number of tokens."""
        return request.owner_ids.tolist(), request.tokens

    def _into(self, request: Request) -> Any:
        """Returns the blocks that a request is pulled into."""
        return request.ids

    def _poison(self, ids: Ids) -> None:
        for worker, contents in zip(self._workers, self._contents, strict=True):
            contents.poison(worker.pool, ids)

    def _verify(self, request: Request) -> None:
        self._compared += 1
        self._wrong += not self._landed(request)

    def _landed(self, request: Request) -> bool:
        """Returns whether every byte is right at every rank of decode."""
        return all(
            contents.equal(worker.pool, request.ids, request.owner_ids, request.tokens)
            for worker, contents in zip(self._workers, self._contents, strict=True)
        )


async def _claims(client: CoordinatorClient, request_id: str, ranks: int) -> None:
    await asyncio.gather(*(client.claim(request_id, _CLAIM_S, rank, ranks) for rank in range(ranks)))


async def _client_of(coordinator: str) -> CoordinatorClient:
    return await CoordinatorClient(coordinator).__aenter__()


def saturation(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields, for rows that differ in their rate alone, the highest rate below every unstable one."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.get("offered_per_s") is not None and "unstable" in row:
            key = tuple(row.get(name) for name in ("transport", "model", "tp", "pp", "tokens", "slots"))
            groups.setdefault(key, []).append(row)
    for (transport, model, tp, pp, tokens, slots), alike in groups.items():
        ranked = sorted(alike, key=lambda row: float(row["offered_per_s"]))
        lost = next((at for at, row in enumerate(ranked) if row["unstable"] or row["failed"]), len(ranked))
        if len(ranked) > 1:
            yield {
                "kind": "saturation", "transport": transport, "model": model, "tp": tp, "pp": pp, "tokens": tokens,
                "slots": slots, "stable_per_s": ranked[lost - 1]["offered_per_s"] if lost else None,
                "unstable_per_s": ranked[lost]["offered_per_s"] if lost < len(ranked) else None,
                "most_achieved_per_s": max(row["achieved_per_s"] for row in ranked),
            }  # fmt: skip
