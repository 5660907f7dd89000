# SPDX-License-Identifier: Apache-2.0
"""Keeps the reports of a coordinator's workers for its overview. Belongs to one event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from kvlink.control.now import now
from kvlink.control.overview import MAX_LINKS, MAX_VIEWED_LINKS, MAX_VIEWS, Beat, WorkerReport, WorkerView
from kvlink.types import WorkerCard


class _Latest(NamedTuple):
    at: float
    report: WorkerReport
    before: WorkerReport | None = None
    interval_s: float = 0.0


class Reports:
    """Keeps the last two reports of each worker of each tenant, until the worker's keep-alive stream ends here."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._latest: dict[tuple[str, str, int], _Latest] = {}
        """The keys are (tenant, worker id, epoch)."""

    def note(self, tenant: str, beat: Beat) -> None:
        """Keeps the report in the beat of a joined worker, if it has one."""
        if beat.report is None:
            return
        now, key = self._clock(), (tenant, beat.worker_id, beat.epoch)
        latest = _Latest(now, beat.report)
        if (last := self._latest.get(key)) is not None:
            latest = latest._replace(before=last.report, interval_s=now - last.at)
        self._latest[key] = latest

    def forget(self, tenant: str, worker_id: str, epoch: int) -> None:
        """Drops the reports of a worker that reports to another coordinator or has stopped."""
        self._latest.pop((tenant, worker_id, epoch), None)

    def views(self, joined: Mapping[str, Collection[WorkerCard]]) -> tuple[WorkerView, ...]:
        """Returns views of the first MAX_VIEWS joined workers, ordered by tenant and name."""
        everyone = [(tenant, card) for tenant, cards in joined.items() for card in cards]
        shown = sorted(everyone, key=_name)[:MAX_VIEWS]
        num_rows = min(MAX_LINKS, max(1, MAX_VIEWED_LINKS // max(len(shown), 1)))
        return tuple(self._view(tenant, card, num_rows) for tenant, card in shown)

    def _view(self, tenant: str, card: WorkerCard, num_rows: int) -> WorkerView:
        transports = tuple(each.name for each in card.transports if not each.refused)
        pool_bytes = sum(card.region_bytes)
        view = WorkerView(
            card.worker_id,
            card.epoch,
            card.agent,
            pool_bytes,
            transports,
            tenant=tenant,
            draining=card.draining,
        )
        latest = self._latest.get((tenant, card.worker_id, card.epoch))
        if latest is None:
            return view
        return view._replace(
            report=_busiest(latest.report, num_rows),
            age_s=self._clock() - latest.at,
            before=latest.before and _busiest(latest.before, num_rows),
            interval_s=latest.interval_s,
        )


def _name(row: tuple[str, WorkerCard]) -> tuple[str, str]:
    return row[0], row[1].worker_id


def _busiest(report: WorkerReport, num_rows: int) -> WorkerReport:
    return report._replace(links=report.links[:num_rows], failures=report.failures[:num_rows])
