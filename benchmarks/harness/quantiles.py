# SPDX-License-Identifier: Apache-2.0
"""Computes quantiles, and how certain they are."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_TAIL = 0.025  # at either end, with 95 % in between


def median_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """Returns the two values between which the true median is with 95 % confidence, for any distribution.

    The number of values below the median is binomial; `z` is in its standard deviations. For fewer than six values it
    returns the smallest and the largest.
    """
    ranked = sorted(values)
    middle, reach = len(ranked) / 2, z * math.sqrt(len(ranked)) / 2
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    return ranked[max(0, low)], ranked[min(len(ranked) - 1, high)]


def quantile_interval(values: Sequence[float], share: float) -> tuple[float | None, float | None]:
    """Returns the two values between which the true quantile is with 95 % confidence, by the exact binomial.

    None means that there are too few values to bound that side (p99.9 with fewer than 3,688 is unbounded above).
    """
    ranked, count = sorted(values), len(values)
    below = np.cumsum(
        _binomial(count, share)
    )  # [k]: the probability that at most k values are below the quantile
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
    """Returns p50_us, p50_low_us, p50_high_us and so on to p999, all of them measured values, or None if unknown."""
    row: dict[str, float | None] = {}
    for name, share in QUANTILES.items():
        low, high = quantile_interval(us, share)
        value = float(np.quantile(us, share, method="inverted_cdf")) if us else None
        row |= {f"{name}_us": value, f"{name}_low_us": low, f"{name}_high_us": high}
    return row


def without_intervals(row: Mapping[str, Any], leave_out: Collection[str]) -> dict[str, Any]:
    """Returns a row of quantiles_us without intervals, so that it fits a screen."""
    return {
        name: value
        for name, value in row.items()
        if name not in leave_out and not name.endswith(("_low_us", "_high_us"))
    }


def with_median_interval(row: Mapping[str, Any], leave_out: Collection[str]) -> dict[str, Any]:
    """Returns a row like without_intervals, with the interval of the median as one text."""
    ends = [row["p50_low_us"], row["p50_high_us"]]
    between = "–".join("" if end is None else f"{end:,.3g}" if end < 100 else f"{end:,.0f}" for end in ends)
    return without_intervals(row, leave_out) | {"p50_us_95": between}
