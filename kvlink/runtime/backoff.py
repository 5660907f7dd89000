# SPDX-License-Identifier: Apache-2.0
"""Defines the delays between attempts to reach another process."""

from __future__ import annotations

import random

FIRST_S = 0.05
LONGEST_S = 2.0


class Backoff:
    """Delays in seconds that double up to a bound. Each is shortened at random, so that callers spread out."""

    def __init__(self) -> None:
        self._next_s = FIRST_S

    def reset(self) -> None:
        """Makes the next delay the first one again."""
        self._next_s = FIRST_S

    def delay_s(self) -> float:
        """Returns a delay between half of the current bound and the bound, and doubles the bound."""
        bound_s = self._next_s
        self._next_s = min(2 * bound_s, LONGEST_S)
        return bound_s * random.uniform(0.5, 1.0)
