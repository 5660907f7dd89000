# SPDX-License-Identifier: Apache-2.0
"""What a reader's transfers came to, by owner and transport. Counted in C++, read when somebody asks."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from kvlink import _core
from kvlink.durations import Durations

MAX_PATHS = 256
"""Owner and transport pairs told apart. The oldest that is not connected makes room for a new one, and is counted under
`OTHERS` from then on; a new one is where all are connected."""
OTHERS = "(others)"


class Path(NamedTuple):
    """From the owner `worker_id` to this worker."""

    worker_id: str
    transport: str


class PathCounts(NamedTuple):
    """Since the start. Bytes, operations, segments and durations are of valid transfers only."""

    valid: int
    num_bytes: int
    num_ops: int
    num_segments: int
    """Descriptors: pieces of local memory that the operations were scattered to."""
    unsettled: int
    """Valid, but the owner could not be told one-sidedly."""
    redone: int
    """Steps that a lane gave back and that were done again."""
    failed: Mapping[str, int]
    """By the name of the exception; StaleBlocks are stale reads that validation caught."""
    plan: Durations
    read: Durations
    validate: Durations
    settle: Durations
    total: Durations

    def plus(self, other: PathCounts) -> PathCounts:
        """Both together."""
        return PathCounts(
            self.valid + other.valid,
            self.num_bytes + other.num_bytes,
            self.num_ops + other.num_ops,
            self.num_segments + other.num_segments,
            self.unsettled + other.unsettled,
            self.redone + other.redone,
            Counter(self.failed) + Counter(other.failed),
            self.plan.plus(other.plan),
            self.read.plus(other.read),
            self.validate.plus(other.validate),
            self.settle.plus(other.settle),
            self.total.plus(other.total),
        )


class Traffic:
    """Tallies outlive the connections that add to them. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[Path, _core.PathStats] = {}
        self._gone: dict[Path, PathCounts] = {}
        """Sums of those that made room, by transport."""
        self.live: Callable[[], Collection[Path]] = tuple
        """Paths that are connected now."""

    def tally(self, worker_id: str, transport: str) -> _core.PathStats:
        """For a new connection."""
        with self._lock:
            path = Path(worker_id, transport)
            if path not in self._tallies and len(self._tallies) >= MAX_PATHS and not self._make_room():
                path = Path(OTHERS, transport)
            tally = self._tallies.pop(path, None) or _core.PathStats()
            self._tallies[path] = tally  # the one opened last is the last
            return tally

    def _make_room(self) -> bool:
        live = self.live()
        oldest = next((path for path in self._tallies if path not in live and path.worker_id != OTHERS), None)
        if oldest is None:
            return False
        counts, others = _read(self._tallies.pop(oldest)), Path(OTHERS, oldest.transport)
        self._gone[others] = counts.plus(self._gone[others]) if others in self._gone else counts
        return True

    def path(self, worker_id: str, transport: str) -> Path:
        """Under which this owner is counted."""
        path = Path(worker_id, transport)
        return path if path in self._tallies else Path(OTHERS, transport)

    def counts(self) -> dict[Path, PathCounts]:
        """Of every path that was ever connected."""
        with self._lock:
            tallies, gone = list(self._tallies.items()), dict(self._gone)
        counts = {path: _read(tally) for path, tally in tallies}
        for path, before in gone.items():
            counts[path] = before.plus(counts[path]) if path in counts else before
        return counts


def _read(tally: _core.PathStats) -> PathCounts:
    counts = tally.counts()
    plan, read, validate, settle, total = (Durations(*row) for row in counts[7:])
    return PathCounts(*counts[:7], plan, read, validate, settle, total)
