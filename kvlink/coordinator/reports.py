# SPDX-License-Identifier: Apache-2.0
"""What a coordinator is told of its workers and counts of its own calls, to show it. Lives on one event loop."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from kvlink.control.now import now
from kvlink.control.overview import MAX_LINKS, MAX_VIEWED_LINKS, MAX_VIEWS, Beat, WorkerReport, WorkerView
from kvlink.types import WorkerCard


class _Told(NamedTuple):
    at: float
    report: WorkerReport
    before: WorkerReport | None = None
    interval_s: float = 0.0


class Reports:
    """The last two reports of each worker of each tenant. One whose worker's stream ends here is forgotten."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self._told: dict[tuple[str, str, int], _Told] = {}
        """By tenant, worker and epoch."""

    def note(self, tenant: str, beat: Beat) -> None:
        """Of a worker that is joined."""
        if beat.report is None:
            return
        now, life = self._clock(), (tenant, beat.worker_id, beat.epoch)
        told = _Told(now, beat.report)
        if (last := self._told.get(life)) is not None:
            told = told._replace(before=last.report, interval_s=now - last.at)
        self._told[life] = told

    def forget(self, tenant: str, worker_id: str, epoch: int) -> None:
        """It reports elsewhere, or no more."""
        self._told.pop((tenant, worker_id, epoch), None)

    def views(self, joined: Mapping[str, Collection[WorkerCard]]) -> tuple[WorkerView, ...]:
        """Of the first MAX_VIEWS workers by tenant and name."""
        everyone = [(tenant, card) for tenant, cards in joined.items() for card in cards]
        shown = sorted(everyone, key=_name)[:MAX_VIEWS]
        num_links = min(MAX_LINKS, MAX_VIEWED_LINKS // max(len(shown), 1))
        return tuple(self._view(tenant, card, num_links) for tenant, card in shown)

    def _view(self, tenant: str, card: WorkerCard, num_links: int) -> WorkerView:
        ways = tuple(way.name for way in card.transports if not way.refused)
        pool_bytes = sum(card.region_bytes)
        view = WorkerView(card.worker_id, card.epoch, card.agent, pool_bytes, ways, tenant=tenant)
        told = self._told.get((tenant, card.worker_id, card.epoch))
        if told is None:
            return view
        return view._replace(
            report=_busiest(told.report, num_links),
            age_s=self._clock() - told.at,
            before=told.before and _busiest(told.before, num_links),
            interval_s=told.interval_s,
        )


def _name(of: tuple[str, WorkerCard]) -> tuple[str, str]:
    return of[0], of[1].worker_id


def _busiest(report: WorkerReport, num_links: int) -> WorkerReport:
    return report._replace(links=report.links[:num_links])
