# SPDX-License-Identifier: Apache-2.0
"""Collects the statistics of a worker from its parts on demand."""

from __future__ import annotations

from collections import Counter

from kvlink.monitoring.worker_stats import Link, WorkerStats
from kvlink.transfer.engine import Engine
from kvlink.transfer.offers import Offers
from kvlink.transfer.path_stats import Path
from kvlink.transfer.peers import Peers
from kvlink.transfer.pulls import Pulls
from kvlink.worker.membership import WorkerMembership


def gather(
    worker_id: str,
    engine: Engine,
    offers: Offers,
    peers: Peers,
    membership: WorkerMembership,
    pulls: Pulls,
) -> WorkerStats:
    """Returns the statistics, which takes microseconds per link. Safe from any thread. Raises ConfigError in a fork."""
    pool = engine.pool
    pinned_blocks = offers.num_pinned_blocks()  # before the lease counts, because it collects ended leases
    return WorkerStats(
        worker_id=worker_id,
        epoch=engine.epoch,
        leases=engine.lease_counts(),
        lease_slots=engine.lease_slots,
        pinned_blocks=pinned_blocks,
        pool_blocks=pool.layout.num_blocks,
        pool_bytes=sum(region.num_bytes for region in pool.regions),
        links=_links(engine, peers),
        offers=offers.durations,
        claims=membership.claims,
        connects=peers.connects.durations,
        connect_retries=peers.connects.num_retries,
        failed_starts=dict(pulls.failed),
        restarts=pulls.num_restarts,
        paths_given_up=peers.memory.num_given_up,
        joined=membership.joined,
        rejoins=membership.num_rejoins,
        ports=tuple(engine.ports()),
        soft_leases=engine.soft_lease_counts(),
        draining=membership.draining,
        prefixes=membership.num_prefixes,
        prefix_lookups=dict(membership.prefix_lookups),
        models={
            "": pool.model.text,
            **{one.card.worker_id: one.card.layouts[0].model for one in peers.all()},
        },
    )


def _links(engine: Engine, peers: Peers) -> tuple[Link, ...]:
    connected: Counter[Path] = Counter()
    queued: Counter[Path] = Counter()
    counts = engine.path_stats.counts()
    for peer in peers.all():
        path = engine.path_stats.path(peer.card.worker_id, peer.transport)
        connected[path] += not peer.connection.broken
        queued[path] += peer.connection.pending
    return tuple(Link(path, connected[path] > 0, queued[path], of) for path, of in counts.items())
