# SPDX-License-Identifier: Apache-2.0
"""Computes how a cost grows with the number of workers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import numpy as np


def exponent(costs: Mapping[int, float]) -> float:
    """Returns the exponent of the power law through (number, cost), by least squares: 1 is linear, 2 quadratic growth.

    Both must be above zero.
    """
    if len(costs) < 2:
        raise ValueError("growth needs two sizes or more")
    numbers, values = (np.log(np.array(list(side), dtype=float)) for side in (costs.keys(), costs.values()))
    slope, _ = np.polyfit(numbers, values, 1)
    return float(slope)


def exponents(costs: Mapping[int, Sequence[float]]) -> tuple[float, float, float]:
    """Returns exponents of costs measured several times: of the least, of the medians, and of the largest."""
    each = [exponent(dict(zip(costs, once, strict=True))) for once in zip(*costs.values(), strict=False)]
    middle = exponent({number: statistics.median(values) for number, values in costs.items()})
    return min(each), middle, max(each)
