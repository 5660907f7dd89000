# SPDX-License-Identifier: Apache-2.0
"""Holds a worker's counts as one value. It is gathered only on request, and costs the data path nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvlink.runtime.durations import Durations
from kvlink.transfer.engine import LeaseCounts, Port, SoftLeaseCounts
from kvlink.transfer.path_stats import Path, PathCounts


@dataclass(frozen=True, slots=True)
class Link:
    """Holds the path from one owner to this worker. `queued` is current, `counts` is since the start."""

    path: Path
    connected: bool
    queued: int
    counts: PathCounts


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """Holds the counts of a worker since its start, unless stated otherwise."""

    worker_id: str
    epoch: int
    leases: LeaseCounts
    lease_slots: int
    """Number of readers that can hold offers at a time."""
    pinned_blocks: int
    """Blocks that wait for readers now. A block of two offers counts twice."""
    pool_blocks: int
    pool_bytes: int
    links: tuple[Link, ...]
    offers: Durations
    claims: Durations
    connects: Durations
    connect_retries: int
    failed_starts: Mapping[str, int]
    """Counts pulls that failed before any transfer started, by the name of the exception."""
    restarts: int
    """Counts pulls that were restarted because their connection was cut."""
    joined: bool | None
    """Whether the worker is joined now, or None without a coordinator."""
    rejoins: int
    ports: tuple[Port, ...] = ()
    soft_leases: SoftLeaseCounts = field(default_factory=SoftLeaseCounts)
    draining: bool = False
    prefixes: int = 0
    """Prefixes that are published now."""
    prefix_lookups: Mapping[str, int] = field(default_factory=dict)
    """Counts lookups of prefixes by outcome."""
    models: Mapping[str, str] = field(default_factory=dict)
    """The models of the connected owners by worker, and of this worker's own pool as ""."""


class StatsSource(Protocol):
    """Provides statistics. Worker implements it."""

    def stats(self) -> WorkerStats:
        """Returns the statistics. Raises KVLinkError if they are not available."""
