# SPDX-License-Identifier: Apache-2.0
"""Compares two results files: what became faster or slower, and whether the difference is more than chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .measures import Key, Results


class Change(NamedTuple):
    """A change. `ratio` is time after / time before. `significant` is None if a row has no interval of its median."""

    key: Key
    before_us: float
    after_us: float
    ratio: float
    significant: bool | None

    @property
    def verdict(self) -> str:
        """Returns the change in a word or two."""
        if self.significant is None:
            return "unknown certainty"
        if not self.significant:
            return "no difference shown"
        return "slower" if self.ratio > 1 else "faster"


def compare(before: Results, after: Results) -> Iterator[Change]:
    """Yields the changes of everything that both files measured.

    Two medians differ if their 95 % intervals are disjoint, which is stricter than significance of their difference at
    95 %.
    """
    earlier = {measure.key: measure for measure in before.measures}
    for measure in after.measures:
        other = earlier.get(measure.key)
        if other is None or not other.p50_us:
            continue
        sure: bool | None = None
        if None not in (measure.low_us, measure.high_us, other.low_us, other.high_us):
            assert measure.low_us is not None
            assert measure.high_us is not None
            assert other.low_us is not None
            assert other.high_us is not None
            sure = measure.low_us > other.high_us or measure.high_us < other.low_us
        yield Change(measure.key, other.p50_us, measure.p50_us, measure.p50_us / other.p50_us, sure)
