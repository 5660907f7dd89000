# SPDX-License-Identifier: Apache-2.0
"""Collects the counters of a reader's transfers by owner and transport. C++ counts, and Python reads on demand."""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from kvlink import _core
from kvlink.runtime.durations import Durations

MAX_PATHS = 256
"""The number of owner and transport pairs with their own counters. Beyond it, the oldest pair that is not connected
makes room for a new pair and counts under `OTHERS` from then on. If all are connected, the new pair counts there."""
OTHERS = "(others)"
_CHECKS = 16  # of paths, whenever one needs room


class Path(NamedTuple):
    """The path from the owner `worker_id` to this worker."""

    worker_id: str
    transport: str


class PathCounts(NamedTuple):
    """Counters since the start. Bytes, operations, segments and durations include valid transfers only."""

    valid: int
    num_bytes: int
    num_ops: int
    num_segments: int
    """The number of descriptors, which are the pieces of local memory that the operations wrote to."""
    unsettled: int
    """The number of valid transfers that could not be settled one-sidedly."""
    redone: int
    """The number of steps that a lane returned and that were repeated."""
    rails_set_aside: int
    """How often a pair of ports was set aside because it was far slower than its equals."""
    failed: Counter[str]
    """Failed transfers by the name of the exception. StaleBlocks counts stale reads that validation detected."""
    stale: Counter[tuple[bool, int]]
    """Stale reads by whether the lease was soft, and by the number of the StaleReason, which says how it had ended."""
    plan: Durations
    read: Durations
    validate: Durations
    settle: Durations
    total: Durations

    @property
    def stale_pinned(self) -> int:
        """Stale reads of blocks that should have been pinned. Those of soft leases are ordinary."""
        return sum(number for (soft, _), number in self.stale.items() if not soft)

    @property
    def failures(self) -> Counter[str]:
        """`failed` without stale reads of soft leases."""
        return self.failed - Counter(StaleBlocks=self.stale.total() - self.stale_pinned)

    def plus(self, other: PathCounts) -> PathCounts:
        """Returns the sum of both."""
        return PathCounts(*map(operator.add, self, other))


class AllPathStats:
    """The counters of all paths. They outlive the connections that add to them. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats: dict[Path, _core.PathStats] = {}
        self._removed: dict[Path, PathCounts] = {}
        """The sums of the paths that made room, by transport."""
        self.is_live: Callable[[Path], bool] = lambda _: False
        """Returns whether a path is connected now."""

    def of_path(self, worker_id: str, transport: str) -> _core.PathStats:
        """Returns the counters for a new connection."""
        with self._lock:
            path = Path(worker_id, transport)
            if path not in self._stats and len(self._stats) >= MAX_PATHS and not self._make_room():
                path = Path(OTHERS, transport)
            stats = self._stats.pop(path, None) or _core.PathStats(transport)
            self._stats[path] = stats  # keeps the dict in the order of the latest connections
            return stats

    def _make_room(self) -> bool:
        """Removes the oldest path that is not connected, of some that are checked in turns."""
        for path in [*islice(self._stats, _CHECKS)]:
            stats = self._stats.pop(path)
            if path.worker_id == OTHERS or self.is_live(path):
                self._stats[path] = stats
                continue
            counts, others = _read(stats), Path(OTHERS, path.transport)
            self._removed[others] = counts.plus(self._removed[others]) if others in self._removed else counts
            return True
        return False

    def path(self, worker_id: str, transport: str) -> Path:
        """Returns the path under which this owner is counted."""
        path = Path(worker_id, transport)
        return path if path in self._stats else Path(OTHERS, transport)

    def outcomes(self, worker_id: str) -> tuple[int, int]:
        """Returns how many transfers from an owner were valid, and how many failed without being cancelled here."""
        with self._lock:
            found = [stats for path, stats in self._stats.items() if path.worker_id == worker_id]
        counts = [_read(stats) for stats in found]
        failed = sum(each.failed.total() - each.failed["Cancelled"] for each in counts)
        return sum(each.valid for each in counts), failed

    def work(self, worker_id: str, transport: str) -> tuple[int, int]:
        """Returns how many transfers over a path were valid, and how many failed because it did not answer."""
        with self._lock:
            stats = self._stats.get(self.path(worker_id, transport))
        if stats is None:
            return 0, 0
        counts = _read(stats)
        return counts.valid, counts.failed["PeerUnreachable"] + counts.failed["TransferTimeout"]

    def counts(self) -> dict[Path, PathCounts]:
        """Returns the counters of every path that was ever connected."""
        with self._lock:
            by_path, removed = list(self._stats.items()), dict(self._removed)
        counts = {path: _read(stats) for path, stats in by_path}
        for path, before in removed.items():
            counts[path] = before.plus(counts[path]) if path in counts else before
        return counts


def _read(stats: _core.PathStats) -> PathCounts:
    counts = stats.counts()
    durations = (Durations(*row) for row in counts[9:])
    return PathCounts(*counts[:7], Counter(counts[7]), Counter(counts[8]), *durations)
