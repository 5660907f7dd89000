# SPDX-License-Identifier: Apache-2.0
"""Converts a coordinator's overview to plain rows with rates, for the page, `kvlink top` and `--json`."""

from __future__ import annotations

from typing import Any

from kvlink.control.overview import LinkReport, Overview, WorkerReport, WorkerView
from kvlink.control.values import CoordinatorStatus
from kvlink.transfer.path_stats import OTHERS

STALE_S = 15.0
"""A report older than this, which is several beats, says little about the present."""

Row = dict[str, Any]

_NOT_OF_LEASES = ("num_links", "links", "failures", "transfers", "received_bytes")


def plain(status: CoordinatorStatus, overview: Overview) -> Row:
    """Returns the overview in types that JSON supports. Counts are since the start of the process that counted."""
    return {
        "coordinator": {**status._asdict(), "feed_lag": overview.feed_lag},
        "workers": [worker_row(view) for view in overview.workers],
        "links": [row for view in overview.workers for row in link_rows(view)],
        "errors": [row for view in overview.workers for row in _error_rows(view)],
        "calls": [call._asdict() for call in overview.calls],
        "refusals": [refusal._asdict() for refusal in overview.refusals],
    }


def worker_row(view: WorkerView) -> Row:
    """Returns the row of one worker with its leases and rates. A value is None if the worker has not reported here."""
    row: Row = {
        "worker": _named(view, view.worker_id),
        "epoch": view.epoch,
        "agent": view.agent,
        "transports": list(view.transports),
        "pool_bytes": view.pool_bytes,
        "draining": view.draining,
        "age_s": view.age_s if view.report else None,
        "stale": view.report is not None and view.age_s > STALE_S,
        "leases": _leases(view.report) if view.report else None,
    }
    row["bytes_per_s"] = _total_rate(view, "received_bytes")
    row["transfers_per_s"] = _total_rate(view, "transfers")
    row["num_links"] = view.report.num_links if view.report else None
    return row


def _named(view: WorkerView, worker_id: str) -> str:
    """Returns the name of a worker of the view's tenant. Tenants may have workers of the same name."""
    return f"{view.tenant}/{worker_id}" if view.tenant and worker_id != OTHERS else worker_id


def _total_rate(view: WorkerView, total: str) -> float | None:
    if view.report is None:
        return None
    return _rate(view, getattr(view.report, total), view.before and getattr(view.before, total))


def _leases(report: WorkerReport) -> Row:
    return {name: value for name, value in report._asdict().items() if name not in _NOT_OF_LEASES}


def link_rows(view: WorkerView) -> list[Row]:
    """Returns rows of the links from owners to this worker, busiest first. Rates are between its last two reports."""
    if view.report is None:
        return []
    before = {link[:2]: link for link in view.before.links} if view.before else {}
    return [_link(view, link, before.get(link[:2])) for link in view.report.links]


def _link(view: WorkerView, link: LinkReport, before: LinkReport | None) -> Row:
    row = {"from": _named(view, link.worker_id), "to": _named(view, view.worker_id), **link._asdict()}
    del row["worker_id"]
    for total in ("bytes", "transfers", "failed"):
        row[f"{total}_per_s"] = _rate(view, getattr(link, total), before and getattr(before, total))
    return row


def _rate(view: WorkerView, now: int, then: int | None) -> float:
    known = then is not None and view.interval_s > 0 and view.age_s <= STALE_S
    return max(now - (then or 0), 0) / view.interval_s if known else 0.0


def _error_rows(view: WorkerView) -> list[Row]:
    if view.report is None:
        return []
    before = {failure.reason: failure.number for failure in view.before.failures} if view.before else {}
    return [
        {
            "worker": _named(view, view.worker_id),
            "reason": failure.reason,
            "number": failure.number,
            "per_s": _rate(view, failure.number, before.get(failure.reason, 0 if view.before else None)),
        }
        for failure in view.report.failures
    ]
