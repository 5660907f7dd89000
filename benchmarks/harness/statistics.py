# SPDX-License-Identifier: Apache-2.0
"""Computes quantiles and how certain they are, whether runs differ, and how costs grow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_TAIL = 0.025  # at either end, with 95 % in between
_ALPHA = 0.01
LEAST_EFFECT = 0.05
"""The smallest change of a time that `compare_runs` reports, as a share."""
_MOST_SPLITS = 20_000
_LEAST, _MOST = 1e-9, 1e15  # what a cost may be; logarithms need ends


def quantile_interval(values: Sequence[float], share: float) -> tuple[float | None, float | None]:
    """Returns the two values between which the true quantile is with 95 % confidence, by the exact binomial.

    None means that there are too few values to bound that side (p99.9 with fewer than 3,688 is unbounded above).
    """
    ranked, count = sorted(values), len(values)
    below = np.cumsum(_binomial(count, share))  # [k]: the chance that at most k values are below it
    low = int(np.searchsorted(below, _TAIL, side="right"))
    high = int(np.searchsorted(below, 1 - _TAIL))
    return ranked[low - 1] if low else None, ranked[high] if high < count else None


def _binomial(count: int, share: float) -> npt.NDArray[np.float64]:
    steps = np.arange(1, count + 1)
    ways = np.concatenate(([0.0], np.cumsum(np.log((count - steps + 1) / steps))))
    hits = np.arange(count + 1)
    chances: npt.NDArray[np.float64] = np.exp(
        ways + hits * math.log(share) + (count - hits) * math.log1p(-share)
    )
    return chances


def quantiles_us(us: Sequence[float]) -> dict[str, float | None]:
    """Returns p50_us, p50_low_us, p50_high_us and so on to p999, then max_us, all of them measured values.

    A quantile above the median is None if its upper end is unknown: so few values have none. A failed request counts
    as infinitely long.
    """
    ranked = sorted(us)
    row: dict[str, float | None] = {}
    for name, share in QUANTILES.items():
        low, high = quantile_interval(ranked, share)
        value = ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None
        known = value if high is not None or name == "p50" else None
        row |= {f"{name}_us": known, f"{name}_low_us": low, f"{name}_high_us": high}
    return row | {"max_us": ranked[-1] if ranked else None}


class Comparison(NamedTuple):
    """Runs of two sides. `ratio` is the time after / the time before, `chance` that of a larger one between equals.

    `chance` is None if the runs are too few for any verdict.
    """

    before: float
    after: float
    ratio: float
    chance: float | None
    least: float = LEAST_EFFECT

    @property
    def verdict(self) -> str:
        """Returns "faster", "slower", "no difference shown" or "not enough runs"."""
        if self.chance is None:
            return "not enough runs"
        if self.chance > _ALPHA or abs(math.log(self.ratio)) < math.log1p(self.least):
            return "no difference shown"
        return "slower" if self.ratio > 1 else "faster"


def compare_runs(before: Sequence[float], after: Sequence[float], least: float = LEAST_EFFECT) -> Comparison:
    """Compares one number of each run by a permutation test. The unit is a run, because a process repeats itself
    better than it repeats others.
    """
    logs = np.log(np.clip(np.array([*before, *after], float), _LEAST, _MOST))
    count, size = len(before), len(logs)
    ends = float(np.exp(np.mean(logs[:count]))), float(np.exp(np.mean(logs[count:])))
    chance = _chance(logs, count) if 2 / math.comb(size, count) <= _ALPHA else None
    return Comparison(*ends, ends[1] / ends[0], chance, least)


def _chance(logs: npt.NDArray[np.float64], count: int) -> float:
    """Returns the share of all ways to split the runs (of many, if there are more) that differ as much or more."""
    size = len(logs)
    if math.comb(size, count) <= _MOST_SPLITS:
        splits = np.array(list(combinations(range(size), count)))
    else:
        rng = np.random.default_rng(size)
        splits = np.array([range(count), *(rng.permutation(size)[:count] for _ in range(_MOST_SPLITS))])
    first = logs[splits].sum(axis=1)
    apart = np.abs(first / count - (logs.sum() - first) / (size - count))
    found = abs(logs[:count].mean() - logs[count:].mean())
    return float(np.mean(apart >= found - 1e-12))


def spread(values: Sequence[float]) -> float:
    """Returns the standard deviation of the logarithms: how well runs repeat each other."""
    return float(np.std(np.log(np.clip(np.array(values, float), _LEAST, _MOST))))


def steps_of(costs: Mapping[int, float]) -> list[tuple[int, float]]:
    """Returns each step of the tail: its upper number, and the exponent there; 1 is linear, 2 quadratic growth.

    The tail is the upper half of the range, on a logarithmic scale. Raises ValueError for fewer than two numbers.
    """
    if len(costs) < 2:
        raise ValueError("growth needs two sizes or more")
    points = sorted((number, min(max(value, _LEAST), _MOST)) for number, value in costs.items())
    middle = math.sqrt(points[0][0] * points[-1][0])
    steps = [
        (above, math.log(high / low) / math.log(above / below))
        for (below, low), (above, high) in pairwise(points)
    ]
    return [step for step in steps if step[0] > middle]


def exponent(costs: Mapping[int, float]) -> float:
    """Returns the largest exponent in the tail. A line through all points would let a flat start hide the tail."""
    return max(grows for _, grows in steps_of(costs))


def exponents(costs: Mapping[int, Sequence[float]]) -> tuple[float, float, float]:
    """Returns exponents of costs measured several times: of the least, of the medians, and of the largest."""
    each = [exponent(dict(zip(costs, once, strict=True))) for once in zip(*costs.values(), strict=False)]
    middle = exponent({number: median(values) for number, values in costs.items()})
    return min(each), middle, max(each)


def histogram(us: Iterable[float], per_doubling: int = 4) -> list[list[float]]:
    """Returns [upper end in µs, count] of each class that has values; a class is a quarter of a doubling."""
    counts: dict[float, int] = {}
    for value in us:
        at = math.ceil(per_doubling * math.log2(max(value, 1.0))) if math.isfinite(value) else math.inf
        counts[at] = counts.get(at, 0) + 1
    return [[round(2 ** (at / per_doubling), 3), counts[at]] for at in sorted(counts)]
