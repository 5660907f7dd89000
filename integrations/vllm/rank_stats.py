# SPDX-License-Identifier: Apache-2.0
"""Counts what one rank did since the last report. Values only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request that was loaded."""

    seconds: float
    """The time from the call until all was valid."""
    noticed_s: float
    """The time from the call until vLLM was notified."""
    post_s: float
    """The time that the call took of the worker's main thread."""
    num_bytes: int
    num_ops: int
    transports: list[str]


@dataclass(slots=True)
class RankStats:
    """Counts and samples, which `take` resets."""

    transfers: list[Transfer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    """Loads that failed, by reason: stale, unreachable, or the name of the exception."""
    expired: int = 0
    """Requests of this rank that no reader fetched within their lease."""
    early_bytes: int = 0
    """The bytes of loads in parts that were here before the prefill's last chunk began."""
    _leases: int = 0
    _paths: set[tuple[str, str]] = field(default_factory=set)

    def is_new_path(self, worker_id: str, transport: str) -> bool:
        """Returns whether this is the first transfer from a peer by this transport, which is logged."""
        path = (worker_id, transport)
        if path in self._paths:
            return False
        self._paths.add(path)
        return True

    def take(self, leases: int, oldest_s: float) -> dict[str, Any] | None:
        """Returns plain data for vLLM's statistics, or None if nothing happened."""
        if not (self.transfers or self.failures or self.expired or leases or self._leases):
            return None
        self._leases = leases  # a change to 0 is reported once
        transfers, self.transfers = self.transfers, []
        failures, self.failures = self.failures, Counter()
        expired, self.expired = self.expired, 0
        early_bytes, self.early_bytes = self.early_bytes, 0
        return {
            "transfer_s": [transfer.seconds for transfer in transfers],
            "noticed_s": [transfer.noticed_s for transfer in transfers],
            "post_s": [transfer.post_s for transfer in transfers],
            "num_bytes": [transfer.num_bytes for transfer in transfers],
            "num_ops": [transfer.num_ops for transfer in transfers],
            "transports": dict(Counter(name for transfer in transfers for name in transfer.transports)),
            "failures": dict(failures),
            "unused": {},
            "expired": expired,
            "early_bytes": early_bytes,
            "leases": leases,
            "oldest_lease_s": oldest_s,
        }
