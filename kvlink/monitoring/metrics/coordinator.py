# SPDX-License-Identifier: Apache-2.0
"""A coordinator's metrics, from counts taken on its event loop just before."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvlink.control.rpc.call_counts import CallCounts
from kvlink.control.values import CoordinatorStatus, StoreHealth
from kvlink.monitoring.metrics.families import Families

_PREFIX = "kvlink_coordinator"


def exposition(status: CoordinatorStatus, calls: CallCounts, health: StoreHealth) -> bytes:
    """The text of /metrics."""
    registry = CollectorRegistry()
    registry.register(_Collector(status, calls, health))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, status: CoordinatorStatus, calls: CallCounts, health: StoreHealth) -> None:
        self._status = status
        self._calls = calls
        self._health = health

    def collect(self) -> Iterable[Metric]:
        families = Families()
        _add_status(families, self._status)
        _add_calls(families, self._calls)
        _add_health(families, self._health)
        return families

    def describe(self) -> Iterable[Metric]:
        return ()


def _add_status(families: Families, status: CoordinatorStatus) -> None:
    gauges = {
        "uptime_seconds": ("Since this coordinator started.", status.uptime_s),
        "workers": ("Workers joined.", status.workers),
        "live_tickets": ("Offered, and neither fully claimed nor expired.", status.tickets),
        "waiting_claims": ("Claims that wait for an offer.", status.waiting_claims),
    }
    counters = {
        "joins": ("Joins, those of workers that came back included.", status.joined),
        "lost_workers": ("Workers that stopped beating without leaving.", status.lost_workers),
        "offers": ("Tickets taken.", status.offered),
        "claims": ("Requests handed over.", status.claimed),
        "expired_tickets": ("Tickets that nobody claimed in time.", status.expired),
        "settle_orders": ("Settles passed on for readers without a data path.", status.settle_orders),
    }
    for name, (meaning, value) in gauges.items():
        families.gauge(f"{_PREFIX}_{name}", meaning, value, {})
    for name, (meaning, count) in counters.items():
        families.count(f"{_PREFIX}_{name}_total", meaning, count, {})


def _add_health(families: Families, health: StoreHealth) -> None:
    healthy = "1: the store does what it is for. 0: it is full, or does not answer."
    stale = "For how long the store has not confirmed that this coordinator is up to date."
    families.gauge(f"{_PREFIX}_store_healthy", healthy, health.is_healthy, {})
    families.gauge(f"{_PREFIX}_store_stale_seconds", stale, health.stale_s, {})


def _add_calls(families: Families, calls: CallCounts) -> None:
    lag = "Changes of membership that the slowest watcher has yet to be sent."
    families.gauge(f"{_PREFIX}_feed_lag", lag, calls.feed_lag, {})
    if expires_at := calls.certificate_expires_at():
        expiry = "When this coordinator's certificate ends, in Unix time."
        families.gauge(f"{_PREFIX}_certificate_expiry_timestamp_seconds", expiry, expires_at, {})
    for method, durations in calls.durations.items():
        latency = "Unary calls answered; Claim waits for its offer."
        families.histogram(f"{_PREFIX}_call_seconds", latency, durations, {"method": method})
    for (method, reason), number in calls.refusals.items():
        refused = "Calls refused, and operations within handoff streams."
        families.count(f"{_PREFIX}_refusals_total", refused, number, {"method": method, "reason": reason})
