# SPDX-License-Identifier: Apache-2.0
"""Holds a worker's counts as one value. It is gathered only on request, and costs the data path nothing."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvlink.control.overview import MAX_LINKS, MAX_REASONS, FailureCount, LinkReport, WorkerReport
from kvlink.errors import KVLinkError
from kvlink.runtime.durations import Durations
from kvlink.transfer.engine import LeaseCounts, Port, SoftLeaseCounts
from kvlink.transfer.path_stats import Path, PathCounts


@dataclass(frozen=True, slots=True)
class Link:
    """Holds the path from one owner to this worker. `queued` is current, `counts` is since the start."""

    path: Path
    connected: bool
    queued: int
    counts: PathCounts


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Holds the counts of a worker since its start, unless stated otherwise."""

    worker_id: str
    epoch: int
    leases: LeaseCounts
    lease_slots: int
    """Number of readers that can hold offers at a time."""
    pinned_blocks: int
    """Blocks that wait for readers now. A block of two offers counts twice."""
    pool_blocks: int
    pool_bytes: int
    links: tuple[Link, ...]
    offers: Durations
    claims: Durations
    connects: Durations
    connect_retries: int
    failed_starts: Mapping[str, int]
    """Counts pulls that failed before any transfer started, by the name of the exception."""
    restarts: int
    """Counts pulls that were restarted because their connection was cut."""
    paths_given_up: int
    """Counts how often a transport whose connections failed under pulls was left for the next one."""
    joined: bool | None
    """Whether the worker is joined now, or None without a coordinator."""
    rejoins: int
    ports: tuple[Port, ...] = ()
    soft_leases: SoftLeaseCounts = field(default_factory=SoftLeaseCounts)
    draining: bool = False
    prefixes: int = 0
    """Prefixes that are published now."""
    prefix_lookups: Mapping[str, int] = field(default_factory=dict)
    """Counts lookups of prefixes by outcome."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The models of the connected owners by worker, and of this worker's own pool as ""."""


class StatsSource(Protocol):
    """Provides statistics. Worker implements it."""

    def stats(self) -> WorkerStats:
        """Returns the statistics. Raises KVLinkError if they are not available."""


_log = logging.getLogger("kvlink.worker")


class Reporter:
    """Makes one report per call. Call it once per beat, on one thread."""

    def __init__(self, worker: StatsSource) -> None:
        self._worker = worker
        self._last: dict[Path, Durations] = {}

    def __call__(self) -> WorkerReport | None:
        """Returns the report, or None if the worker is closing. Raises nothing, because the beat must be sent."""
        try:
            stats = self._worker.stats()
        except KVLinkError:
            return None
        except Exception:
            _log.exception("cannot gather statistics for the coordinator, beating without a report")
            return None
        report = _report(stats, self._last)
        self._last = {link.path: link.counts.total for link in stats.links}
        return report


def _report(stats: WorkerStats, last: dict[Path, Durations]) -> WorkerReport:
    leases = stats.leases
    order = sorted(stats.links, key=lambda link: (link.connected, link.counts.num_bytes), reverse=True)
    failures = Counter(stats.failed_starts)
    for link in stats.links:
        failures.update(link.counts.failures)
    return WorkerReport(
        active_leases=leases.active,
        oldest_lease_s=leases.oldest_s,
        lease_slots=stats.lease_slots,
        pinned_blocks=stats.pinned_blocks,
        pool_blocks=stats.pool_blocks,
        granted=leases.granted,
        settled=leases.settled,
        expired=leases.expired,
        aborted=leases.aborted,
        fenced_readers=leases.fenced_readers,
        num_links=len(stats.links),
        links=tuple(_link(link, last.get(link.path, Durations())) for link in order[:MAX_LINKS]),
        failures=tuple(FailureCount(*row) for row in failures.most_common(MAX_REASONS)),
        transfers=sum(link.counts.valid for link in stats.links),
        received_bytes=sum(link.counts.num_bytes for link in stats.links),
    )


def _link(link: Link, before: Durations) -> LinkReport:
    counts, recent = link.counts, link.counts.total.since(before)
    return LinkReport(
        *link.path,
        connected=link.connected,
        queued=link.queued,
        transfers=counts.valid,
        bytes=counts.num_bytes,
        failed=counts.failures.total(),
        stale=counts.stale_pinned,
        p50_s=recent.quantile_s(0.5),
        p99_s=recent.quantile_s(0.99),
    )
