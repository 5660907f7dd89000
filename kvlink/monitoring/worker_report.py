# SPDX-License-Identifier: Apache-2.0
"""Makes the report that a worker sends with each beat: bounded statistics, with percentiles since the last report."""

from __future__ import annotations

import logging
from collections import Counter

from kvlink.control.overview import MAX_LINKS, MAX_REASONS, FailureCount, LinkReport, WorkerReport
from kvlink.errors import KVLinkError
from kvlink.monitoring.worker_stats import Link, StatsSource, WorkerStats
from kvlink.runtime.durations import Durations
from kvlink.transfer.path_stats import Path

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
