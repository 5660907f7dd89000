# SPDX-License-Identifier: Apache-2.0
"""How long to wait before asking again."""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds that double up to a bound, each shortened at random so that callers spread out."""

    def __init__(self, first_s: float = 0.05, most_s: float = 2.0) -> None:
        self._first_s = self._next_s = first_s
        self._most_s = most_s

    def reset(self) -> None:
        """The next delay is the first one again."""
        self._next_s = self._first_s

    def delay_s(self) -> float:
        """Between half of the current bound and all of it."""
        bound_s = self._next_s
        self._next_s = min(2 * bound_s, self._most_s)
        return bound_s * random.uniform(0.5, 1.0)
