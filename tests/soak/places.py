# SPDX-License-Identifier: Apache-2.0
"""Where a reader pulls to. After a pull its place is poisoned, and checked again before the next one uses it."""

from __future__ import annotations

import threading
from collections import deque

from soak.contents import POISON, Words


class Places:
    """Ranges of a pool's blocks. The one that was used longest ago is used next. Safe from any thread."""

    def __init__(self, words: Words, blocks_each: int) -> None:
        self._words = words
        self._words[:] = POISON
        self._lock = threading.Lock()
        self._free = deque(range(0, len(words) - blocks_each + 1, blocks_each))
        self._blocks_each = blocks_each
        self._late = 0

    def take(self) -> int | None:
        """The first block of a poisoned place; None: all are used."""
        with self._lock:
            if not self._free:
                return None
            first = self._free.popleft()
        self._look(first)
        return first

    def release(self, first: int) -> None:
        """A pull to it has ended: what lands from now on is late."""
        self._words[first : first + self._blocks_each] = POISON
        with self._lock:
            self._free.append(first)

    def take_late(self) -> int:
        """Places that were written to after their pull had ended, since the last call."""
        with self._lock:
            late, self._late = self._late, 0
        return late

    def look_at_all(self) -> None:
        """At those that no pull uses."""
        with self._lock:
            places, self._free = list(self._free), deque()
        for first in places:
            self._look(first)
        with self._lock:
            self._free.extend(places)

    def _look(self, first: int) -> None:
        place = self._words[first : first + self._blocks_each]
        if (place != POISON).any():
            place[:] = POISON
            with self._lock:
                self._late += 1
