# SPDX-License-Identifier: Apache-2.0
"""Counts what one rank did since the last report. Values only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES = ("transfer_s", "noticed_s", "post_s", "num_bytes", "num_ops")
"""The fields of a Transfer of which every value is reported."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request that was loaded."""

    transfer_s: float
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
    turns: Counter[str] = field(default_factory=Counter)
    """Answers of earlier turns that were pulled, or why not, see KVLinkStats."""
    expired: int = 0
    """Requests of this rank that no reader fetched within their lease."""
    early_bytes: int = 0
    """The bytes of loads in parts that were here before the prefill's last chunk began."""
    _leases: int = 0

    def take(self, leases: int, oldest_s: float, guarded: Mapping[str, int]) -> dict[str, Any] | None:
        """Returns plain data for vLLM's statistics, or None if nothing happened. `guarded` is of RequestGuard."""
        happened = self.transfers or self.failures or self.turns or self.expired or guarded
        if not (happened or leases or self._leases):
            return None
        self._leases = leases  # a change to 0 is reported once
        data = {
            **{name: [getattr(transfer, name) for transfer in self.transfers] for name in SAMPLES},
            "transports": dict(Counter(name for transfer in self.transfers for name in transfer.transports)),
            "failures": dict(self.failures),
            "unused": {},
            "decisions": {},
            "turns": dict(self.turns),
            "guarded": dict(guarded),
            "expired": self.expired,
            "early_bytes": self.early_bytes,
            "leases": leases,
            "oldest_lease_s": oldest_s,
        }
        self.transfers, self.failures, self.turns = [], Counter(), Counter()
        self.expired, self.early_bytes = 0, 0
        return data
