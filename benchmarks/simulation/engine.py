# SPDX-License-Identifier: Apache-2.0
"""Simulates prefill and decode workers over time: pulls start, share the rails, end, or lose their leases.

A pull takes its bytes over all rails that work at both ends, as many over each as its rate allows, and rail i of one
worker reaches rail i of another. Time is that of the simulation, in seconds. Equal input gives equal output.
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
class Failure:
    """A prefill worker's rail that is dead from `at_s` on."""

    at_s: float
    worker: int
    rail: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers. A decode worker has `pulls` in flight, others wait. A dead rail is known after `notice_s`."""

    prefill: int
    decode: int
    rails: Rails
    pulls: int = 8
    lease_s: float = 30.0
    notice_s: float = 0.54  # eight retries of 67 ms, as NICs are configured
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A request offered at `at_s`. Its first byte moves `start_s` after the pull starts."""

    at_s: float
    num_bytes: float
    start_s: float
    prefill: int
    decode: int


class Fate(Enum):
    """The result of a job. After EXPIRED and UNREACHABLE, decode computes the request again."""

    MOVED = "moved"
    EXPIRED = "expired"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a job. `took_s` counts from the offer. `num_bytes` crossed the rails, whatever the fate."""

    job: Job
    fate: Fate
    took_s: float
    num_bytes: float


class _Pull:
    __slots__ = ("due", "flows", "job", "left", "not_before", "over", "rate", "since")

    def __init__(self, job: Job) -> None:
        self.job = job
        self.left = float(job.num_bytes)
        self.rate = self.since = self.not_before = 0.0
        self.due = inf  # the earliest check whether it has ended
        self.flows: list[tuple[int, Flow]] = []  # each with the number of rails that it stands for
        self.over = False


class Simulation:
    """Simulates a fleet. Call `run` once."""

    def __init__(self, fleet: Fleet, jobs: Sequence[Job]) -> None:
        self._fleet = fleet
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Any, Any]] = []
        self._outcomes: list[Outcome] = []
        # Rails without a failure are equal everywhere, so one stands for all of them.
        marked = sorted({failure.rail for failure in fleet.failures})
        if marked and not 0 <= marked[0] <= marked[-1] < fleet.rails.count:
            raise ValueError(f"workers have {fleet.rails.count} rails, so rail {marked} cannot fail")
        alike = fleet.rails.count - len(marked)
        self._weights = [1] * len(marked) + [alike] * bool(alike)
        self._send = [[Port(fleet.rails.send) for _ in self._weights] for _ in range(fleet.prefill)]
        self._receive = [[Port(fleet.rails.receive) for _ in self._weights] for _ in range(fleet.decode)]
        self._under_way = [0] * fleet.decode
        self._waiting: list[deque[_Pull]] = [deque() for _ in range(fleet.decode)]
        for failure in fleet.failures:
            self._at(failure.at_s, self._fail, self._send[failure.worker][marked.index(failure.rail)])
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
        ends = zip(self._weights, self._send[pull.job.prefill], self._receive[pull.job.decode], strict=True)
        ceiling = self._fleet.rails.flow
        pull.flows = [
            (weight, Flow(send, to, ceiling, pull))
            for weight, send, to in ends
            if send.capacity and to.capacity
        ]
        if pull.flows:
            self._share([port for _, flow in pull.flows for port in (flow.sender, flow.receiver)])
        else:
            self._at(self._now + self._fleet.notice_s, self._give_up, pull)

    def _share(self, changed: Sequence[Port]) -> None:
        for pull in dict.fromkeys(flow.of for flow in share(changed)):
            self._progress(pull)
            pull.rate = sum(weight * flow.rate for weight, flow in pull.flows)
            self._look_later(pull)

    def _progress(self, pull: _Pull) -> None:
        pull.left -= pull.rate * (self._now - pull.since)
        pull.since = self._now

    def _look_later(self, pull: _Pull) -> None:
        """Schedules a check for when it should end. A check that is scheduled earlier will schedule the next."""
        ends = self._now + pull.left / pull.rate if pull.rate else inf
        if ends < pull.due:
            pull.due = ends
            self._at(ends, self._look, pull)

    def _look(self, pull: _Pull) -> None:
        if pull.over:
            return
        self._progress(pull)
        if pull.left <= pull.rate * _DONE_S:
            pull.left = 0.0
            if self._now >= pull.not_before:
                self._end(pull, Fate.MOVED)
            else:
                self._release(pull)
                self._at(pull.not_before, self._look, pull)
        elif self._now >= pull.due:
            pull.due = inf
            self._look_later(pull)

    def _expire(self, pull: _Pull) -> None:
        """Expires a lease: the owner cuts off the reader. No earlier pull still waits, as it was cut off before."""
        if not pull.over:
            self._progress(pull)
            self._end(pull, Fate.EXPIRED)

    def _fail(self, port: Port) -> None:
        """Fails a rail. Pulls continue on their other rails, and repeat what was in flight when the loss shows."""
        port.capacity = 0.0
        affected = [(flow, flow.of) for flow in port.flows]
        changed = [end for flow, _ in affected for end in flow.end()]
        known = self._now + self._fleet.notice_s
        for flow, pull in affected:
            self._progress(pull)
            pull.flows = [pair for pair in pull.flows if pair[1] is not flow]
            pull.rate = sum(weight * other.rate for weight, other in pull.flows)
            pull.not_before, pull.due = known, inf
            if pull.flows:
                self._look_later(pull)
            else:
                self._at(known, self._give_up, pull)
        self._share([port, *changed])

    def _give_up(self, pull: _Pull) -> None:
        if not pull.over:
            self._end(pull, Fate.UNREACHABLE)

    def _end(self, pull: _Pull, fate: Fate) -> None:
        pull.over = True
        job = pull.job
        self._outcomes.append(Outcome(job, fate, self._now - job.at_s, job.num_bytes - pull.left))
        self._release(pull)
        self._under_way[job.decode] -= 1
        self._start_next(job.decode)

    def _release(self, pull: _Pull) -> None:
        changed = [port for _, flow in pull.flows for port in flow.end()]
        pull.flows, pull.rate = [], 0.0
        self._share(changed)
