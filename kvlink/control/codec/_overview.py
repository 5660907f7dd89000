# SPDX-License-Identifier: Apache-2.0
"""Defines the codecs of beats, their reports and the overview. kvlink.control.overview documents the fields."""

from __future__ import annotations

from kvlink.control import limits
from kvlink.control.codec._bounds import Bounds, Repeated, Single
from kvlink.control.codec._wire import check_name, check_printable, check_within, codec, nothing, plain
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
_SCALARS = tuple(name for name in WorkerReport._fields if name not in ("links", "failures"))


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


_write_link, _read_link = plain(LinkReport, pb.LinkReport, _check_link)
_write_failure, _read_failure = plain(FailureCount, pb.FailureCount, _check_failure)
_write_call, _read_call = plain(CallCount, pb.CallCount, _check_call)
_write_refusal, _read_refusal = plain(RefusalCount, pb.RefusalCount, _check_refusal)


def _check_report(report: WorkerReport) -> None:
    check_within("oldest_lease_s", report.oldest_lease_s, 0, _MOST_S)
    check_within("number of links", len(report.links), 0, MAX_LINKS)
    check_within("number of failures", len(report.failures), 0, MAX_REASONS)


def _write_report(report: WorkerReport) -> pb.WorkerReport:
    _check_report(report)
    return pb.WorkerReport(
        **{name: getattr(report, name) for name in _SCALARS},
        links=map(_write_link, report.links),
        failures=map(_write_failure, report.failures),
    )


def _read_report(message: pb.WorkerReport) -> WorkerReport:
    check_within("number of links", len(message.links), 0, MAX_LINKS)  # before any of them is read
    check_within("number of failures", len(message.failures), 0, MAX_REASONS)
    report = WorkerReport(
        **{name: getattr(message, name) for name in _SCALARS},
        links=tuple(map(_read_link, message.links)),
        failures=tuple(map(_read_failure, message.failures)),
    )
    _check_report(report)
    return report


def _optional(report: WorkerReport | None) -> pb.WorkerReport | None:
    return None if report is None else _write_report(report)


def _write_beat(beat: Beat) -> coordinator.Beat:
    check_name("worker_id", beat.worker_id)
    return coordinator.Beat(worker_id=beat.worker_id, epoch=beat.epoch, report=_optional(beat.report))


def _read_beat(message: coordinator.Beat) -> Beat:
    check_name("worker_id", message.worker_id)
    report = _read_report(message.report) if message.HasField("report") else None
    return Beat(message.worker_id, message.epoch, report)


def _check_view(view: WorkerView) -> None:
    check_name("worker_id", view.worker_id)
    check_within("age_s", view.age_s, 0, _MOST_S)
    check_within("interval_s", view.interval_s, 0, _MOST_S)
    check_printable("an agent, a tenant or a transport", view.agent, view.tenant, *view.transports)
    check_within("bytes of a tenant", len(view.tenant.encode()), 0, limits.MAX_NAME_BYTES)
    check_within("number of transports", len(view.transports), 0, limits.MAX_TRANSPORTS)


def _write_view(view: WorkerView) -> pb.WorkerView:
    _check_view(view)
    reports = {"report": _optional(view.report), "before": _optional(view.before)}
    return pb.WorkerView(**(view._asdict() | reports))


def _read_view(message: pb.WorkerView) -> WorkerView:
    view = WorkerView(
        message.worker_id,
        message.epoch,
        message.agent,
        message.pool_bytes,
        tuple(message.transports),
        _read_report(message.report) if message.HasField("report") else None,
        message.age_s,
        _read_report(message.before) if message.HasField("before") else None,
        message.interval_s,
        message.tenant,
    )
    _check_view(view)
    return view


def _write_overview(overview: Overview) -> pb.OverviewReply:
    check_within("number of workers", len(overview.workers), 0, MAX_VIEWS)
    return pb.OverviewReply(
        workers=map(_write_view, overview.workers),
        calls=map(_write_call, overview.calls),
        refusals=map(_write_refusal, overview.refusals),
        feed_lag=overview.feed_lag,
    )


def _read_overview(message: pb.OverviewReply) -> Overview:
    check_within("number of workers", len(message.workers), 0, MAX_VIEWS)
    return Overview(
        tuple(map(_read_view, message.workers)),
        tuple(map(_read_call, message.calls)),
        tuple(map(_read_refusal, message.refusals)),
        message.feed_lag,
    )


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

BEAT = codec(coordinator.Beat, _write_beat, _read_beat, {3: Single(_REPORT)})
ASK_OVERVIEW = nothing(pb.OverviewRequest)
OVERVIEW = codec(pb.OverviewReply, _write_overview, _read_overview, _OVERVIEW)
