# SPDX-License-Identifier: Apache-2.0
"""How sure a median is."""

from __future__ import annotations

import math
from collections.abc import Sequence


def median_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float]:
    """Between which two of the values the true median lies with 95 % confidence; no distribution is assumed.

    The number of values below the median is binomial; `z` is in its standard deviations. Fewer than six values: all.
    """
    ranked = sorted(values)
    middle, reach = len(ranked) / 2, z * math.sqrt(len(ranked)) / 2
    low, high = math.floor(middle - reach), math.ceil(middle + reach)
    return ranked[max(0, low)], ranked[min(len(ranked) - 1, high)]
