# SPDX-License-Identifier: Apache-2.0
"""Counts the calls that a server answered, with their durations, by method and outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvlink.control.overview import CallCount, Overview, RefusalCount, WorkerView
from kvlink.control.rpc.feed import Feed
from kvlink.runtime.durations import Durations


class CallCounts:
    """Counts the calls that one server answered. Refusals include those inside handoff streams."""

    def __init__(self) -> None:
        self.durations: dict[str, Durations] = {}
        self.refusals: Counter[tuple[str, str]] = Counter()
        """Counts refusals by (method, reason)."""
        self.feeds: set[Feed[Any]] = set()
        self.certificate_expires_at: Callable[[], float] = lambda: 0.0
        """Returns the Unix time when the server's certificate expires, or 0 without a certificate."""

    def answered(self, method: str, ns: int) -> None:
        """Notes a call that was answered with a reply or a refusal after `ns` nanoseconds."""
        durations = self.durations.get(method)
        if durations is None:
            durations = self.durations[method] = Durations()
        durations.add(ns)

    def refused(self, method: str, reason: str) -> None:
        """Notes a refused call. `reason` names a `refusal.Reason`."""
        self.refusals[method, reason] += 1

    @property
    def feed_lag(self) -> int:
        """Returns the number of items that the slowest watcher has yet to be sent."""
        return max(map(len, self.feeds), default=0)

    def overview(self, workers: tuple[WorkerView, ...]) -> Overview:
        """Returns the overview of these workers with the counts of this server."""
        calls = [
            CallCount(method, durations.count, durations.quantile_s(0.5), durations.quantile_s(0.99))
            for method, durations in sorted(self.durations.items())
        ]
        refusals = [RefusalCount(*key, count) for key, count in sorted(self.refusals.items())]
        return Overview(workers, tuple(calls), tuple(refusals), self.feed_lag)
