# SPDX-License-Identifier: Apache-2.0
"""Counts durations in buckets of powers of two, so that adding one costs a few instructions.

csrc/engine/path_stats.h has the same buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

_FIRST = 9
_NUM_BUCKETS = 27

BOUNDS_S = tuple((1 << shift) / 1e9 for shift in range(_FIRST, _FIRST + _NUM_BUCKETS - 1))
"""Upper bounds of all buckets except the last, which has none: 512 ns, 1.024 us, … 17.2 s."""


class Durations:
    """A histogram of durations. Concurrent additions may be lost but are never counted in a wrong bucket."""

    __slots__ = ("buckets", "sum_ns")

    def __init__(self, sum_ns: int = 0, buckets: Sequence[int] = (0,) * _NUM_BUCKETS) -> None:
        self.sum_ns = sum_ns
        self.buckets = list(buckets)

    def __repr__(self) -> str:
        return f"Durations({self.count} of {self.sum_ns} ns)"

    def add(self, ns: int) -> None:
        """Adds one duration in nanoseconds."""
        self.buckets[min(max((ns - 1).bit_length() - _FIRST, 0), _NUM_BUCKETS - 1)] += 1
        self.sum_ns += ns

    @property
    def count(self) -> int:
        """The number of durations that were added."""
        return sum(self.buckets)

    def __add__(self, other: Durations) -> Durations:
        """Returns the sum of both histograms."""
        buckets = [own + theirs for own, theirs in zip(self.buckets, other.buckets, strict=True)]
        return Durations(self.sum_ns + other.sum_ns, buckets)

    def since(self, earlier: Durations) -> Durations:
        """Returns what was added after `earlier`, which is a copy of the same histogram."""
        buckets = [now - then for now, then in zip(self.buckets, earlier.buckets, strict=True)]
        return Durations(self.sum_ns - earlier.sum_ns, buckets)

    def quantile_s(self, share: float) -> float:
        """Returns the quantile `share` (0 to 1) in seconds, assuming that each bucket is filled evenly.

        Returns 0 for an empty histogram.
        """
        wanted, seen = share * self.count, 0
        for bucket, number in enumerate(self.buckets):
            if number and seen + number >= wanted:
                most = BOUNDS_S[min(bucket, len(BOUNDS_S) - 1)]
                least = 0.0 if bucket == 0 else BOUNDS_S[bucket - 1]
                return least + (most - least) * (wanted - seen) / number
            seen += number
        return 0.0
