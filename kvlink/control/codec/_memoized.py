# SPDX-License-Identifier: Apache-2.0
"""Memoizes a function of immutable values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
M = TypeVar("M")


class Memoized(Generic[T, M]):
    """Calls `make` once per value. Values are compared by identity, because comparing large ones is expensive.

    Keeps the last `most` values and their results. Callers must not change a result.
    """

    def __init__(self, make: Callable[[T], M], most: int) -> None:
        self._make = make
        self._most = most
        self._made: dict[int, tuple[T, M]] = {}

    def __call__(self, value: T) -> M:
        """Returns the result for `value`. An exception of `make` is raised again at every call."""
        known = self._made.get(id(value))
        if known is None:
            known = value, self._make(value)
            if len(self._made) >= self._most:
                self._made.pop(next(iter(self._made)), None)
            self._made[id(value)] = known
        return known[1]
