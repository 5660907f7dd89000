# SPDX-License-Identifier: Apache-2.0
"""Simulates prefill workers with prefix caches that may pull prefixes from each other. Pure: time is a value.

A worker computes one prompt at a time, in the order in which prompts are ready. A pull starts when its request
arrives, runs beside the computation of others, and has the links of both ends to itself. Whether to pull is decided by
the product's own `pull_or_compute`, from predictions that do not know of other pulls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kvlink.worker.prefix_choice import PrefillRate, pull_or_compute

from ..workloads.traces import HASH_TOKENS, Request
from .prefix_cache import PrefixCache

WITHDRAW_S = 2.0
"""How long the directory shows what a worker has evicted."""


@dataclass(frozen=True, slots=True)
class PrefillFleet:
    """Workers that are alike. `pull_s` gives the time of a pull of so many tokens without others."""

    workers: int
    cache_tokens: int
    rate: PrefillRate
    pull_s: Callable[[int], float]
    margin: float = 1.5


@dataclass(slots=True)
class Served:
    """How one prompt was served, in tokens. `ttft_s` ends when it has been computed."""

    prompt: int
    ttft_s: float = 0.0
    computed: int = 0
    pulled: int = 0
    moved: int = 0
    """Also those of pulls that were stale in the end."""
    stale: bool = False
    declined: bool = False
    """A peer had more of it, but a pull did not promise to be faster."""


@dataclass(slots=True)
class _Job:
    at_s: float
    blocks: tuple[int, ...]
    served: Served
    worker: _Worker
    estimate_s: float
    pulled: int = 0  # blocks


@dataclass(slots=True, eq=False)
class _Worker:
    cache: PrefixCache
    queue: deque[_Job] = field(default_factory=deque)
    queued_s: float = 0.0
    ends_s: float = 0.0
    busy: bool = False
    send_free_s: float = 0.0
    receive_free_s: float = 0.0

    def waits_s(self, now: float) -> float:
        return self.queued_s + (max(0.0, self.ends_s - now) if self.busy else 0.0)


class PrefixSharing:
    """Simulates a fleet. Call `run` once.

    by_prefix: route to the worker that promises the earliest first token, by its cache and its queue. Otherwise by the
        queue alone.
    peers: pull from peers.
    """

    def __init__(self, fleet: PrefillFleet, by_prefix: bool, peers: bool) -> None:
        self._fleet = fleet
        self._by_prefix = by_prefix
        self._peers = peers
        num_blocks = fleet.cache_tokens // HASH_TOKENS
        self._workers = [_Worker(PrefixCache(num_blocks, WITHDRAW_S)) for _ in range(fleet.workers)]
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = count()
        self._now = 0.0
        self._served: list[Served] = []

    def run(self, requests: Sequence[Request], speed: float = 1.0) -> list[Served]:
        """Returns how each request was served, in order of arrival. They arrive `speed` times as fast as they did."""
        for request in requests:
            self._at(request.at_s / speed, self._arrive, request)
        while self._events:
            self._now, _, do, subject = heappop(self._events)
            do(subject)
        return self._served

    def _at(self, at_s: float, do: Callable[[Any], None], subject: object) -> None:
        heappush(self._events, (at_s, next(self._order), do, subject))

    def _arrive(self, request: Request) -> None:
        blocks = request.prefixes[
            : max(0, request.prompt_tokens - 1) // HASH_TOKENS
        ]  # one token is left to compute
        worker = self._route(request.prompt_tokens, blocks)
        hit = worker.cache.hit(blocks)
        served = Served(request.prompt_tokens)
        self._served.append(served)
        estimate_s = self._fleet.rate.predict_s(request.prompt_tokens - hit * HASH_TOKENS)
        job = _Job(self._now, blocks, served, worker, estimate_s)
        worker.queued_s += estimate_s
        if not (self._peers and self._pull(job, hit)):
            self._ready(job)

    def _route(self, num_tokens: int, blocks: tuple[int, ...]) -> _Worker:
        if not self._by_prefix:
            return min(self._workers, key=lambda each: each.waits_s(self._now))

        def first_token_s(worker: _Worker) -> float:
            missing = num_tokens - worker.cache.hit(blocks) * HASH_TOKENS
            return worker.waits_s(self._now) + self._fleet.rate.predict_s(missing)

        return min(self._workers, key=first_token_s)

    def _pull(self, job: _Job, hit: int) -> bool:
        reader = job.worker
        others = [each for each in self._workers if each is not reader]
        if not others:
            return False
        hits = {each: each.cache.seems_to_hit(job.blocks, self._now) for each in others}
        owner = max(others, key=lambda each: (hits[each], -each.send_free_s))
        tokens = (hits[owner] - hit) * HASH_TOKENS
        if tokens <= 0:
            return False
        pull_s = self._fleet.pull_s(tokens)
        if not pull_or_compute(tokens, pull_s, self._fleet.rate, margin=self._fleet.margin).pull:
            job.served.declined = True
            return False
        ends_s = max(self._now, owner.send_free_s, reader.receive_free_s) + pull_s
        owner.send_free_s = reader.receive_free_s = ends_s
        job.served.moved = tokens
        self._at(ends_s, self._landed, (job, owner, hits[owner]))
        return True

    def _landed(self, what: tuple[_Job, _Worker, int]) -> None:
        job, owner, end = what
        if owner.cache.hit(job.blocks) >= end:
            job.pulled = end
            job.served.pulled = job.served.moved
            job.worker.cache.use(job.blocks[:end], self._now)
        else:
            job.served.stale = True
        self._ready(job)

    def _ready(self, job: _Job) -> None:
        job.worker.queue.append(job)
        self._start_next(job.worker)

    def _start_next(self, worker: _Worker) -> None:
        if worker.busy or not worker.queue:
            return
        job = worker.queue.popleft()
        worker.queued_s = max(0.0, worker.queued_s - job.estimate_s)
        hit = max(job.pulled, worker.cache.hit(job.blocks))
        worker.cache.use(job.blocks[:hit], self._now)
        job.served.computed = job.served.prompt - hit * HASH_TOKENS
        worker.busy = True
        worker.ends_s = self._now + self._fleet.rate.predict_s(job.served.computed)
        self._at(worker.ends_s, self._computed, job)

    def _computed(self, job: _Job) -> None:
        job.served.ttft_s = self._now - job.at_s
        job.worker.cache.use(job.blocks, self._now)
        job.worker.busy = False
        self._start_next(job.worker)
