# SPDX-License-Identifier: Apache-2.0
"""Defines the delays between attempts to reach another process."""

from __future__ import annotations

import random

FIRST_S = 0.05
LONGEST_S = 2.0
_MOST_DOUBLINGS = 64  # more than any delay takes to reach its bound, and few enough for a float


def doubled_s(failures: int, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> float:
    """Returns the delay after so many failures in a row: `first_s` after one, doubled by each other, up to a bound."""
    return min(first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s)


class Backoff:
    """Delays in seconds that double up to a bound. Each is shortened at random, so that callers spread out."""

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        """Makes the next delay the first one again."""
        self._failures = 0

    def delay_s(self) -> float:
        """Returns a delay between half of the current bound and the bound, and doubles the bound."""
        self._failures += 1
        return doubled_s(self._failures) * random.uniform(0.5, 1.0)
