# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of beats, their reports and the overview. kvlink.control.overview documents the fields."""

from __future__ import annotations

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated, Single
from kvlink.control.codec._wire import (
    Memoized,
    by_name,
    check_name,
    check_printable,
    check_within,
    codec,
    nothing,
)
from kvlink.control.overview import (
    MAX_LINKS,
    MAX_REASON_BYTES,
    MAX_REASONS,
    MAX_VIEWS,
    Beat,
    CallCount,
    FailureCount,
    LinkReport,
    Overview,
    RefusalCount,
    WorkerReport,
    WorkerView,
)
from kvlink.v1 import coordinator_pb2 as coordinator
from kvlink.v1 import overview_pb2 as pb

_MOST_S = 1e12


def _check_link(link: LinkReport) -> None:
    check_name("worker_id", link.worker_id)
    check_name("transport", link.transport)
    check_within("p50_s", link.p50_s, 0, _MOST_S)
    check_within("p99_s", link.p99_s, 0, _MOST_S)


def _check_failure(failure: FailureCount) -> None:
    check_within("bytes of a reason", len(failure.reason.encode()), 1, MAX_REASON_BYTES)
    check_printable("a reason", failure.reason)


def _check_call(call: CallCount) -> None:
    check_name("method", call.method)
    check_within("p50_s", call.p50_s, 0, _MOST_S)
    check_within("p99_s", call.p99_s, 0, _MOST_S)


def _check_refusal(refusal: RefusalCount) -> None:
    check_name("method", refusal.method)
    check_name("reason", refusal.reason)


def _check_report(report: WorkerReport) -> None:
    check_within("oldest_lease_s", report.oldest_lease_s, 0, _MOST_S)
    check_within("number of links", len(report.links), 0, MAX_LINKS)
    check_within("number of failures", len(report.failures), 0, MAX_REASONS)


def _check_beat(beat: Beat) -> None:
    check_name("worker_id", beat.worker_id)


def _check_view(view: WorkerView) -> None:
    check_name("worker_id", view.worker_id)
    check_within("age_s", view.age_s, 0, _MOST_S)
    check_within("interval_s", view.interval_s, 0, _MOST_S)
    check_printable("an agent, a tenant or a transport", view.agent, view.tenant, *view.transports)
    check_within("bytes of a tenant", len(view.tenant.encode()), 0, limits.MAX_NAME_BYTES)
    check_within("number of transports", len(view.transports), 0, limits.MAX_TRANSPORTS)


def _check_overview(overview: Overview) -> None:
    check_within("number of workers", len(overview.workers), 0, MAX_VIEWS)


_REPORT: Bounds = {12: Repeated("links", MAX_LINKS), 13: Repeated("failures", MAX_REASONS)}
_VIEW: Bounds = {
    5: Repeated("transports", limits.MAX_TRANSPORTS),
    6: Single(_REPORT),
    8: Single(_REPORT),
}
_OVERVIEW: Bounds = {
    1: Repeated("workers", MAX_VIEWS, _VIEW),
    2: Repeated("calls", limits.MAX_METHODS),
    3: Repeated("refusals", limits.MAX_METHODS),
}

_report = by_name(
    WorkerReport,
    pb.WorkerReport,
    _check_report,
    links=by_name(LinkReport, pb.LinkReport, _check_link),
    failures=by_name(FailureCount, pb.FailureCount, _check_failure),
)
_beat = by_name(Beat, coordinator.Beat, _check_beat, optional=("report",), report=_report)
_view = by_name(
    WorkerView, pb.WorkerView, _check_view, optional=("report", "before"), report=_report, before=_report
)
write_view = Memoized(_view[0], most=MAX_VIEWS)
"""Views may be written some at a time, before the overview with all of them."""
_overview = by_name(
    Overview,
    pb.OverviewReply,
    _check_overview,
    workers=(write_view, _view[1]),
    calls=by_name(CallCount, pb.CallCount, _check_call),
    refusals=by_name(RefusalCount, pb.RefusalCount, _check_refusal),
)

BEAT = codec(coordinator.Beat, *_beat, {3: Single(_REPORT)})
ASK_OVERVIEW = nothing(pb.OverviewRequest)
OVERVIEW = codec(pb.OverviewReply, *_overview, _OVERVIEW)
