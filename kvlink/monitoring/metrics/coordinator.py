# SPDX-License-Identifier: Apache-2.0
"""Exports a coordinator's metrics, from counts that were just taken on its event loop."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvlink.control.rpc.call_counts import CallCounts
from kvlink.control.values import CoordinatorStatus, StoreHealth
from kvlink.monitoring.metrics.families import Families

_PREFIX = "kvlink_coordinator"


def exposition(status: CoordinatorStatus, calls: CallCounts, health: StoreHealth) -> bytes:
    """Returns the text of /metrics."""
    families = Families()
    _add_status(families, status)
    _add_calls(families, calls)
    _add_health(families, health)
    families.loops()
    registry = CollectorRegistry()
    registry.register(families)
    return generate_latest(registry)


def _add_status(families: Families, status: CoordinatorStatus) -> None:
    gauges = {
        "uptime_seconds": ("Time since this coordinator started.", status.uptime_s),
        "workers": ("Workers that are joined.", status.workers),
        "draining_workers": (
            "Joined workers that drain: they end soon and want no new requests.",
            status.draining,
        ),
        "live_tickets": ("Tickets that are neither fully claimed nor expired.", status.tickets),
        "waiting_claims": ("Claims that wait for an offer.", status.waiting_claims),
        "prefixes": ("Prefixes in the directory.", status.prefixes),
        "prefix_bytes": ("Memory of the directory of prefixes, estimated.", status.prefix_bytes),
    }
    counters = {
        "joins": ("Joins, including those of workers that came back.", status.joined),
        "lost_workers": ("Workers that stopped beating without leaving.", status.lost_workers),
        "offers": ("Tickets accepted.", status.offered),
        "claims": ("Claims answered with tickets.", status.claimed),
        "expired_tickets": ("Tickets that were not claimed in time.", status.expired),
        "settle_orders": ("Settles forwarded for readers without a data path.", status.settle_orders),
        "published_prefixes": ("Prefixes published, also those published again.", status.published_prefixes),
        "evicted_prefixes": ("Prefixes forgotten because the directory was full.", status.evicted_prefixes),
        "expired_prefixes": ("Prefixes forgotten because their time had passed.", status.expired_prefixes),
        "prefix_lookups": ("Lookups in the directory of prefixes.", status.prefix_lookups),
        "prefix_hits": ("Lookups that found a prefix of another worker.", status.prefix_hits),
    }
    for name, (meaning, value) in gauges.items():
        families.gauge(f"{_PREFIX}_{name}", meaning, value, {})
    for name, (meaning, count) in counters.items():
        families.count(f"{_PREFIX}_{name}_total", meaning, count, {})


def _add_health(families: Families, health: StoreHealth) -> None:
    healthy = "1 if the store works, 0 if it is full or does not answer."
    stale = "Time since the store last confirmed that this coordinator is up to date, 0 if it is."
    families.gauge(f"{_PREFIX}_store_healthy", healthy, health.is_healthy, {})
    families.gauge(f"{_PREFIX}_store_stale_seconds", stale, health.stale_s, {})


def _add_calls(families: Families, calls: CallCounts) -> None:
    lag = "Changes of membership that the slowest watcher has yet to be sent."
    families.gauge(f"{_PREFIX}_feed_lag", lag, calls.feed_lag, {})
    if expires_at := calls.certificate_expires_at():
        expiry = "Unix time at which this coordinator's certificate expires."
        families.gauge(f"{_PREFIX}_certificate_expiry_timestamp_seconds", expiry, expires_at, {})
    for method, durations in calls.durations.items():
        latency = "Time of answered unary calls. Claim waits for its offer."
        families.histogram(f"{_PREFIX}_call_seconds", latency, durations, {"method": method})
    for (method, reason), number in calls.refusals.items():
        refused = "Calls refused, and operations within handoff streams."
        families.count(f"{_PREFIX}_refusals_total", refused, number, {"method": method, "reason": reason})
