# SPDX-License-Identifier: Apache-2.0
"""Finds the keys that are due with a heap. Insertion and removal are lazy, so nothing is ever scanned."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Deadlines(Generic[K]):
    """Keeps one deadline per key, in seconds of any one clock. Every call is O(log n) amortised.

    A key enters the heap only when `next` or `due` is called, because most keys are discarded before that.
    """

    def __init__(self) -> None:
        self._new: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._current: dict[K, int] = {}
        """Maps each key to the number of its latest entry in the heap."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._current)

    def set(self, key: K, deadline: float) -> None:
        """Sets or moves the deadline of `key`."""
        self._current.pop(key, None)
        self._new[key] = deadline

    def discard(self, key: K) -> None:
        """Removes `key` if it is present."""
        if self._new.pop(key, None) is None:
            self._current.pop(key, None)

    def next(self) -> float:
        """Returns a time before which no key is due, or `math.inf` when there is no key."""
        self._enter()
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float, most: int = sys.maxsize) -> list[K]:
        """Removes and returns at most `most` keys whose deadline has passed, earliest first."""
        self._enter()
        keys: list[K] = []
        while self._heap and self._heap[0][0] <= now and len(keys) < most:
            _, number, key = heapq.heappop(self._heap)
            if self._current.get(key) == number:
                del self._current[key]
                keys.append(key)
        return keys

    def _enter(self) -> None:
        for key, deadline in self._new.items():
            self._number += 1
            self._current[key] = self._number
            heapq.heappush(self._heap, (deadline, self._number, key))
        self._new.clear()
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
