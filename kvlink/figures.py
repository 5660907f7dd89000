# SPDX-License-Identifier: Apache-2.0
"""What a worker has counted, as one value. Gathered when somebody asks; nothing is kept for it on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvlink.engine import Engine, LeaseCounts, Port
from kvlink.histogram import Durations
from kvlink.peers import Peers
from kvlink.prefill import Offers
from kvlink.presence import Presence
from kvlink.starting import Starts
from kvlink.traffic import Path, PathCounts


@dataclass(frozen=True, slots=True)
class Link:
    """The path from one owner to this worker. `queued` is of now, `counts` since the start."""

    path: Path
    connected: bool
    queued: int
    counts: PathCounts


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Since the start, unless said otherwise."""

    worker_id: str
    epoch: int
    leases: LeaseCounts
    lease_slots: int
    """How many readers can hold offers at one time."""
    pinned_blocks: int
    """That wait for readers now; one of two offers counts twice."""
    pool_blocks: int
    pool_bytes: int
    links: tuple[Link, ...]
    offers: Durations
    claims: Durations
    connects: Durations
    connect_retries: int
    failed_starts: Mapping[str, int]
    """Pulls of which no transfer was started, by the name of the exception."""
    restarts: int
    """Pulls that began again because their connection was cut."""
    joined: bool | None
    """Now; None: there is no coordinator."""
    rejoins: int
    ports: tuple[Port, ...] = ()


class Counted(Protocol):
    """A Worker."""

    def figures(self) -> WorkerFigures:
        """What it has counted. Raises KVLinkError when it cannot say."""


def gather(
    worker_id: str, engine: Engine, offers: Offers, peers: Peers, presence: Presence, starts: Starts
) -> WorkerFigures:
    """Takes microseconds a link. From any thread. Raises ConfigError in a forked child."""
    pool = engine.pool
    pinned_blocks = offers.num_pinned_blocks()  # first: it ends what was settled
    return WorkerFigures(
        worker_id=worker_id,
        epoch=engine.epoch,
        leases=engine.lease_counts(),
        lease_slots=engine.lease_slots,
        pinned_blocks=pinned_blocks,
        pool_blocks=pool.layout.num_blocks,
        pool_bytes=sum(region.num_bytes for region in pool.regions),
        links=_links(engine, peers),
        offers=offers.durations,
        claims=presence.claims,
        connects=peers.connects.durations,
        connect_retries=peers.connects.num_retries,
        failed_starts=dict(starts.failed),
        restarts=starts.num_restarts,
        joined=presence.joined,
        rejoins=presence.num_rejoins,
        ports=tuple(engine.ports()),
    )


def _links(engine: Engine, peers: Peers) -> tuple[Link, ...]:
    connected: Counter[Path] = Counter()
    queued: Counter[Path] = Counter()
    counts = engine.traffic.counts()
    for peer in peers.all():
        path = engine.traffic.path(peer.card.worker_id, peer.transport)
        connected[path] += not peer.connection.broken
        queued[path] += peer.connection.pending
    return tuple(Link(path, connected[path] > 0, queued[path], of) for path, of in counts.items())
