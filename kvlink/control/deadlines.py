# SPDX-License-Identifier: Apache-2.0
"""Finds the keys that are due with a heap. Insertion and removal are lazy, so nothing is ever scanned."""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


_MOST_NEW, _MOVED = 4_096, 512
"""So many keys enter the heap at once, or move from one to the other: a few milliseconds at most."""


class Deadlines(Generic[K]):
    """Keeps one deadline per key, in seconds of any one clock. Every call is O(log n), and none visits all keys.

    A key enters the heap only when `next` or `due` is called or many have come, because most are discarded before that.
    """

    def __init__(self) -> None:
        self._new: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._old: list[tuple[float, int, K]] = []
        """A second heap, half of which was out of date. What is not moves to the first one."""
        self._current: dict[K, int] = {}
        """Maps each key to the number of its latest entry in a heap."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._current)

    def set(self, key: K, deadline: float) -> None:
        """Sets or moves the deadline of `key`."""
        self._current.pop(key, None)
        self._new[key] = deadline
        if len(self._new) >= _MOST_NEW:
            self._enter()

    def discard(self, key: K) -> None:
        """Removes `key` if it is present."""
        if self._new.pop(key, None) is None:
            self._current.pop(key, None)

    def next(self) -> float:
        """Returns a time before which no key is due, or `math.inf` when there is no key."""
        self._enter()
        heap = self._earlier()
        return heap[0][0] if heap else math.inf

    def due(self, now: float, most: int = sys.maxsize) -> list[K]:
        """Removes and returns keys whose deadline has passed, earliest first, after at most `most` steps.

        `next` says whether there are more.
        """
        self._enter()
        keys: list[K] = []
        while most > 0 and (heap := self._earlier()) and heap[0][0] <= now:
            most -= 1
            _, number, key = heapq.heappop(heap)
            if self._current.get(key) == number:
                del self._current[key]
                keys.append(key)
        return keys

    def _earlier(self) -> list[tuple[float, int, K]]:
        """Returns the heap that has the earliest deadline."""
        if not self._old or (self._heap and self._heap[0] < self._old[0]):
            return self._heap
        return self._old

    def _enter(self) -> None:
        for key, deadline in self._new.items():
            self._number += 1
            self._current[key] = self._number
            heapq.heappush(self._heap, (deadline, self._number, key))
        self._new.clear()
        if not self._old and len(self._heap) > 2 * len(self._current) + 64:
            self._heap, self._old = [], self._heap
        for _ in range(min(_MOVED, len(self._old))):
            entry = self._old.pop()  # a heap without its last entry is one
            if self._current.get(entry[2]) == entry[1]:
                heapq.heappush(self._heap, entry)
