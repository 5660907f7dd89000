# SPDX-License-Identifier: Apache-2.0
"""Counts and durations of the calls that a server answered, by method and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvlink.control.overview import CallCount, Overview, RefusalCount, WorkerView
from kvlink.control.rpc.feed import Feed
from kvlink.durations import Durations


class CallCounts:
    """Calls that one server answered. Refusals include those inside handoff streams."""

    def __init__(self) -> None:
        self.durations: dict[str, Durations] = {}
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By method and reason."""
        self.feeds: set[Feed[Any]] = set()
        self.certificate_expires_at: Callable[[], float] = lambda: 0.0
        """Unix time; 0: there is none."""

    def answered(self, method: str, ns: int) -> None:
        """Well or with a refusal."""
        durations = self.durations.get(method)
        if durations is None:
            durations = self.durations[method] = Durations()
        durations.add(ns)

    def refused(self, method: str, reason: str) -> None:
        """`reason` names a `refusal.Reason`."""
        self.refusals[method, reason] += 1

    @property
    def feed_lag(self) -> int:
        """Items that the slowest watcher has yet to be sent."""
        return max(map(len, self.feeds), default=0)

    def overview(self, workers: tuple[WorkerView, ...]) -> Overview:
        """With what was counted here."""
        calls = [
            CallCount(method, of.count, of.quantile_s(0.5), of.quantile_s(0.99))
            for method, of in sorted(self.durations.items())
        ]
        refusals = [RefusalCount(*key, count) for key, count in sorted(self.refusals.items())]
        return Overview(workers, tuple(calls), tuple(refusals), self.feed_lag)
