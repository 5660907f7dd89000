# SPDX-License-Identifier: Apache-2.0
"""What is made of a value that never changes is made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
M = TypeVar("M")


class Remembered(Generic[T, M]):
    """Calls `make` once a value, known by its identity: to compare large values would cost as much.

    Holds the last `most` of them and what was made, which callers must not change.
    """

    def __init__(self, make: Callable[[T], M], most: int) -> None:
        self._make = make
        self._most = most
        self._made: dict[int, tuple[T, M]] = {}

    def __call__(self, value: T) -> M:
        """Raises what `make` does, every time."""
        known = self._made.get(id(value))
        if known is None:
            known = value, self._make(value)
            if len(self._made) >= self._most:
                self._made.pop(next(iter(self._made)), None)
            self._made[id(value)] = known
        return known[1]
