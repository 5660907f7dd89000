# SPDX-License-Identifier: Apache-2.0
"""What a reader's transfers came to, by owner and transport. Counted in C++, read when somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from kvlink import _core
from kvlink.histogram import Durations

MAX_PATHS = 256
"""Owner and transport pairs told apart. Whatever comes later is counted under `OTHERS`."""
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


class Traffic:
    """Tallies outlive the connections that add to them. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[Path, _core.Tally] = {}

    def tally(self, worker_id: str, transport: str) -> _core.Tally:
        """For a new connection."""
        with self._lock:
            path = Path(worker_id, transport)
            if path not in self._tallies and len(self._tallies) >= MAX_PATHS:
                path = Path(OTHERS, transport)
            return self._tallies.setdefault(path, _core.Tally())

    def path(self, worker_id: str, transport: str) -> Path:
        """Under which this owner is counted."""
        path = Path(worker_id, transport)
        return path if path in self._tallies else Path(OTHERS, transport)

    def counts(self) -> dict[Path, PathCounts]:
        """Of every path that was ever connected."""
        with self._lock:
            tallies = list(self._tallies.items())
        return {path: _read(tally) for path, tally in tallies}


def _read(tally: _core.Tally) -> PathCounts:
    counts = tally.counts()
    plan, read, validate, settle, total = (Durations(*row) for row in counts[7:])
    return PathCounts(*counts[:7], plan, read, validate, settle, total)
