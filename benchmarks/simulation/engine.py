# SPDX-License-Identifier: Apache-2.0
"""Simulates prefill and decode workers over time: pulls start, share the rails, end, or lose their leases.

A pull takes its bytes over all rails, and rail i of one worker reaches rail i of another. All rails are alike, so a
worker has one port for all of them. Time is that of the simulation, in seconds. Equal input gives equal output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from .sharing import Flow, Port, share

_DONE_S = 1e-9  # the rest of a pull below which only rounding is left; doubles resolve it for ten days


@dataclass(frozen=True, slots=True)
class Rails:
    """The NICs of every worker, with the capacity of each in bytes/s. `flow` is the limit of one pull on one rail."""

    count: int
    send: float
    receive: float
    flow: float = inf


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers. A decode worker has `pulls` in flight, others wait."""

    prefill: int
    decode: int
    rails: Rails
    pulls: int = 8
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request offered at `at_s`. Its first byte moves `start_s` after the pull starts."""

    at_s: float
    num_bytes: float
    start_s: float
    prefill: int
    decode: int


class Fate(Enum):
    """The result of a job. After EXPIRED, decode computes the request again."""

    MOVED = "moved"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job. `took_s` counts from the offer. `num_bytes` crossed the rails, whatever the fate."""

    job: Job
    fate: Fate
    took_s: float
    num_bytes: float


class _Pull:
    __slots__ = ("due", "flow", "job", "left", "over", "rate", "since")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.left = float(job.num_bytes)
        self.rate = self.since = 0.0
        self.due = inf  # the earliest check whether it has ended
        self.flow: Flow | None = None
        self.over = False


class Simulation:
    """Simulates a fleet. Call `run` once."""

    def __init__(self, fleet: Fleet, jobs: Sequence[Job]) -> None:
        self._fleet = fleet
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Any, Any]] = []
        self._outcomes: list[Outcome] = []
        rails = fleet.rails
        self._send = [Port(rails.count * rails.send) for _ in range(fleet.prefill)]
        self._receive = [Port(rails.count * rails.receive) for _ in range(fleet.decode)]
        self._under_way = [0] * fleet.decode
        self._waiting: list[deque[_Pull]] = [deque() for _ in range(fleet.decode)]
        for job in jobs:
            self._at(job.at_s, self._offer, job)

    def run(self) -> list[Outcome]:
        """Returns the outcome of every job, in the order in which they end."""
        events = self._events
        while events:
            self._now, _, do, subject = heappop(events)
            do(subject)
        return self._outcomes

    def _at(self, at_s: float, do: Any, subject: Any) -> None:
        heappush(self._events, (at_s, next(self._order), do, subject))

    def _offer(self, job: Job) -> None:
        pull = _Pull(job)
        self._at(job.at_s + self._fleet.lease_s, self._expire, pull)
        self._waiting[job.decode].append(pull)
        self._start_next(job.decode)

    def _start_next(self, decode: int) -> None:
        while self._waiting[decode] and self._under_way[decode] < self._fleet.pulls:
            pull = self._waiting[decode].popleft()
            self._under_way[decode] += 1
            self._at(self._now + pull.job.start_s, self._move, pull)

    def _move(self, pull: _Pull) -> None:
        if pull.over:
            return
        pull.since = self._now
        ends = self._send[pull.job.prefill], self._receive[pull.job.decode]
        pull.flow = Flow(*ends, self._fleet.rails.count * self._fleet.rails.flow, pull)
        self._share(ends)

    def _share(self, changed: Sequence[Port]) -> None:
        for flow in share(changed):
            pull = flow.of
            self._progress(pull)
            pull.rate = flow.rate
            self._check_later(pull)

    def _progress(self, pull: _Pull) -> None:
        pull.left -= pull.rate * (self._now - pull.since)
        pull.since = self._now

    def _check_later(self, pull: _Pull) -> None:
        """Schedules a check for when it should end. A check that is scheduled earlier will schedule the next."""
        ends = self._now + pull.left / pull.rate if pull.rate else inf
        if ends < pull.due:
            pull.due = ends
            self._at(ends, self._check, pull)

    def _check(self, pull: _Pull) -> None:
        if pull.over:
            return
        self._progress(pull)
        if pull.left <= pull.rate * _DONE_S:
            pull.left = 0.0
            self._end(pull, Fate.MOVED)
        elif self._now >= pull.due:
            pull.due = inf
            self._check_later(pull)

    def _expire(self, pull: _Pull) -> None:
        """Expires a lease: the owner cuts off the reader. No earlier pull still waits, as it was cut off before."""
        if not pull.over:
            self._progress(pull)
            self._end(pull, Fate.EXPIRED)

    def _end(self, pull: _Pull, fate: Fate) -> None:
        pull.over = True
        job = pull.job
        self._outcomes.append(Outcome(job, fate, self._now - job.at_s, job.num_bytes - pull.left))
        if pull.flow is not None:
            self._share(pull.flow.end())
        self._under_way[job.decode] -= 1
        self._start_next(job.decode)
