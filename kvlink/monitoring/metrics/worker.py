# SPDX-License-Identifier: Apache-2.0
"""Exports a worker's metrics, read from its counters at each scrape.

A metric whose name vLLM's connector also uses has the same meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvlink.errors import KVLinkError, StaleReason
from kvlink.layout.model_identity import model_labels
from kvlink.monitoring.metrics.families import Families
from kvlink.monitoring.worker_stats import Link, StatsSource, WorkerStats
from kvlink.runtime.durations import Durations

_PHASE = "Time of one phase. Plan, read, validate and settle count valid transfers only, by transport."
_PHASES = ("plan", "read", "validate", "settle")


class WorkerCollector(Collector):
    """Collects the metrics of workers for `CollectorRegistry.register`.

    A worker that belongs to the process before a fork is left out.
    """

    def __init__(self, workers: Sequence[StatsSource]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics of one scrape."""
        families = Families()
        for worker in self._workers:
            try:
                stats = worker.stats()
            except KVLinkError:
                continue
            _add_leases(families, stats)
            _add_phases(families, stats)
            _add_starts(families, stats)
            _add_prefixes(families, stats)
            _add_ports(families, stats)
            _add_models(families, stats)
            for link in stats.links:
                _add_link(families, link, stats.worker_id)
        families.loops()
        return families.collect()

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that the registry does not collect at registration. The names are known to be unique."""
        return ()


def _add_leases(families: Families, stats: WorkerStats) -> None:
    worker, leases = {"worker": stats.worker_id}, stats.leases
    gauges = {
        "active_leases": ("Offers whose blocks are pinned for their readers.", leases.active),
        "oldest_lease_seconds": ("Age of the oldest active offer.", leases.oldest_s),
        "lease_slots": ("Readers that can hold offers at one time.", stats.lease_slots),
        "pinned_blocks": ("Blocks of live offers.", stats.pinned_blocks),
        "pool_blocks": ("Blocks of the pool.", stats.pool_blocks),
        "pool_bytes": ("Bytes of the pool.", stats.pool_bytes),
    }
    counters = {
        "granted_leases_total": ("Offers made.", leases.granted),
        "settled_leases_total": ("Offers that all their readers settled.", leases.settled),
        "expired_leases_total": ("Offers that were not fetched within their lease.", leases.expired),
        "aborted_leases_total": ("Offers that were withdrawn.", leases.aborted),
        "fenced_readers_total": ("Readers cut off because their lease expired.", leases.fenced_readers),
    }
    soft = stats.soft_leases
    gauges["soft_leases"] = (
        "Soft offers, whose blocks are not pinned and still have their content.",
        soft.active,
    )
    counters["granted_soft_leases_total"] = ("Soft offers made.", soft.granted)
    ended = {"evicted": soft.evicted, "displaced": soft.displaced, "expired": soft.expired}
    for how, number in ended.items():
        meaning = "Soft offers that ended."
        families.count("kvlink_ended_soft_leases_total", meaning, number, {**worker, "how": how})
    for name, (meaning, value) in gauges.items():
        families.gauge(f"kvlink_{name}", meaning, value, worker)
    for name, (meaning, count) in counters.items():
        families.count(f"kvlink_{name}", meaning, count, worker)
    drains = "1 if the worker drains: it ends soon and wants no new requests."
    families.gauge("kvlink_draining", drains, stats.draining, worker)
    if stats.joined is not None:
        families.gauge("kvlink_joined", "1 if the coordinator knows this worker.", stats.joined, worker)
        families.count(
            "kvlink_rejoins_total", "Times the worker rejoined a coordinator.", stats.rejoins, worker
        )


def _add_prefixes(families: Families, stats: WorkerStats) -> None:
    if stats.joined is None:
        return
    worker = {"worker": stats.worker_id}
    published = "Prefixes that this worker has in the coordinator's directory."
    families.gauge("kvlink_published_prefixes", published, stats.prefixes, worker)
    for outcome in ("found", "none", "failed"):
        number, lookups = stats.prefix_lookups.get(outcome, 0), "Lookups of prefixes in the directory."
        families.count("kvlink_prefix_lookups_total", lookups, number, {**worker, "outcome": outcome})


def _add_starts(families: Families, stats: WorkerStats) -> None:
    worker = {"worker": stats.worker_id}
    retries = "Connects to an owner that were retried."
    families.count("kvlink_connect_retries_total", retries, stats.connect_retries, worker)
    restarts = "Pulls that were restarted on a new connection because theirs was cut."
    families.count("kvlink_restarted_pulls_total", restarts, stats.restarts, worker)
    given_up = "Times that a transport whose connections failed under pulls was left for the next one."
    families.count("kvlink_paths_given_up_total", given_up, stats.paths_given_up, worker)
    for reason, number in stats.failed_starts.items():
        unstarted = "Pulls that failed before any transfer started, at claim or connect."
        families.count("kvlink_unstarted_pulls_total", unstarted, number, {**worker, "reason": reason})


def _add_ports(families: Families, stats: WorkerStats) -> None:
    for port in stats.ports:
        labels = {"worker": stats.worker_id, "nic": port.name}
        families.gauge(
            "kvlink_nic_away", "1 if its device is gone and being looked for.", bool(port.away), labels
        )
        families.count(
            "kvlink_nic_losses_total", "Times that its device was removed or failed.", port.times_away, labels
        )


def _add_models(families: Families, stats: WorkerStats) -> None:
    for peer, text in stats.models.items():
        labels = {"worker": stats.worker_id, "peer": peer, **model_labels(text)}
        meaning = "The model of the worker's pool (without peer), and of each connected owner's. Always 1."
        families.gauge("kvlink_model_info", meaning, 1, labels)


def _add_phases(families: Families, stats: WorkerStats) -> None:
    alone = {"offer": stats.offers, "claim": stats.claims, "connect": stats.connects}
    rows = {("", phase): durations for phase, durations in alone.items()}
    for link in stats.links:
        for phase in _PHASES:
            key = (link.path.transport, phase)
            rows[key] = rows.get(key, Durations()) + getattr(link.counts, phase)
    for (transport, phase), durations in rows.items():
        labels = {"worker": stats.worker_id, "transport": transport, "phase": phase}
        families.histogram("kvlink_phase_seconds", _PHASE, durations, labels)


def _add_link(families: Families, link: Link, worker: str) -> None:
    labels = {"worker": worker, "peer": link.path.worker_id, "transport": link.path.transport}
    counts = link.counts
    whole = "Time of a transfer from one owner, from the call until all of it was valid (and settled)."
    families.histogram("kvlink_transfer_seconds", whole, counts.total, labels, coarse=True)
    for name, meaning, number in (
        ("received_bytes", "Valid bytes that were received.", counts.num_bytes),
        ("read_operations", "Reads after adjacent blocks were merged.", counts.num_ops),
        ("read_descriptors", "Local memory segments that reads were scattered to.", counts.num_segments),
        (
            "retried_steps",
            "Steps of transfers that a lane returned and that were repeated.",
            counts.redone,
        ),
        (
            "rails_set_aside",
            "Times that a pair of ports was set aside because it was far slower than its equals.",
            counts.rails_set_aside,
        ),
        ("unsettled_transfers", "Valid transfers without a one-sided settle.", counts.unsettled),
        (
            "stale_reads",
            "Reads of pinned blocks that validation found stale and dropped.",
            counts.stale_pinned,
        ),
    ):
        families.count(f"kvlink_{name}_total", meaning, number, labels)
    for (soft, why), number in counts.stale.items():
        stale = "Stale reads by how their lease had ended."
        how = {"lease": "soft" if soft else "pinned", "why": StaleReason(why).name.lower()}
        families.count("kvlink_stale_reads_by_end_total", stale, number, {**labels, **how})
    for reason, number in counts.failures.items():
        failed = "Transfers that failed. No byte of them was used."
        families.count("kvlink_failed_transfers_total", failed, number, {**labels, "reason": reason})
    families.gauge("kvlink_queued_transfers", "Transfers queued or running at lanes.", link.queued, labels)
    families.gauge("kvlink_connected", "1 if connected to this owner.", link.connected, labels)
