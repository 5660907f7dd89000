# SPDX-License-Identifier: Apache-2.0
"""What a worker has counted, as one value. Gathered when somebody asks; nothing is kept for it on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvlink.durations import Durations
from kvlink.transfer.engine import LeaseCounts, Port
from kvlink.transfer.path_stats import Path, PathCounts


@dataclass(frozen=True, slots=True)
class Link:
    """The path from one owner to this worker. `queued` is of now, `counts` since the start."""

    path: Path
    connected: bool
    queued: int
    counts: PathCounts


@dataclass(frozen=True, slots=True)
class WorkerStats:
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

    def stats(self) -> WorkerStats:
        """What it has counted. Raises KVLinkError when it cannot say."""
