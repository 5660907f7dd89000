# SPDX-License-Identifier: Apache-2.0
"""Fits cost models to measured transfers, with their errors on transfers to which they were not fitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import PRIORS, Cost

from ..harness.results import number, read_rows

LEAST_SHAPES = 3
_CONTROL = ("offer", "claim", "validate", "settle")

_ASSUMED = (0.5, 2.0)  # of costs that were not fitted here
_ENDS = ("p50_low_us", "p50_high_us")


class Sample(NamedTuple):
    """A measured transfer. `ops` are contiguous pieces."""

    ops: int
    num_bytes: int
    us: float


class Fit(NamedTuple):
    """A cost model. `errors` are predicted / measured - 1 of each sample, by a fit to the other shapes only.

    It has no errors if the shapes are too few.
    """

    cost: Cost
    samples: int
    errors: tuple[float, ...]

    @classmethod
    def assumed(cls, cost: Cost = PRIORS["verbs"]) -> Fit:
        """Returns a model that was fitted to nothing here."""
        return cls(cost, 0, ())

    @property
    def factors(self) -> tuple[float, float]:
        """Returns between which multiples of a prediction the times of all samples were, each not in its fit."""
        if not self.errors:
            return _ASSUMED
        return min(1.0, 1 / (1 + max(self.errors))), max(1.0, 1 / (1 + min(self.errors)))

    @property
    def worst(self) -> float | None:
        """Returns the error with the largest magnitude."""
        return max(map(abs, self.errors), default=None)


def fit(samples: Sequence[Sample]) -> Cost:
    """Returns the Cost with the least squares of relative errors and without negative parts. Raises ConfigError."""
    if num_shapes(samples) < LEAST_SHAPES:
        raise ConfigError(
            f"a cost model needs transfers of {LEAST_SHAPES} shapes or more; measure more shapes"
        )
    table = np.array(samples, float)
    parts = np.stack([np.ones(len(table)), table[:, 0], table[:, 1]], axis=1) / table[:, 2:]
    start, op, byte = _least_squares(parts)
    # A rate without effect on the measurements is unknown; 1e6 GiB/s predicts nothing for it.
    return Cost(start, op * 1000, 1e6 / 2**30 / byte if byte > 0 else 1e6)


def _least_squares(parts: Any) -> list[float]:
    """Returns non-negative coefficients that bring each row of `parts` nearest to 1: the best of all subsets in use."""
    count = parts.shape[1]
    best, best_error = [0.0] * count, float("inf")
    for size in range(1, count + 1):
        for used in combinations(range(count), size):
            found, *_ = np.linalg.lstsq(parts[:, used], np.ones(len(parts)), rcond=None)
            error = float(np.sum((parts[:, used] @ found - 1) ** 2))
            if (found >= 0).all() and error < best_error:
                best = [0.0] * count
                for index, value in zip(used, found.tolist(), strict=True):
                    best[index] = value
                best_error = error
    return best


def num_shapes(samples: Iterable[Sample]) -> int:
    """Returns how many different shapes the samples have."""
    return len({_shape(sample) for sample in samples})


def cross_validated(samples: Sequence[Sample]) -> Fit:
    """Fits with one shape omitted at a time. Raises ConfigError."""
    errors = []
    for left in samples if num_shapes(samples) > LEAST_SHAPES else ():
        cost = fit([sample for sample in samples if _shape(sample) != _shape(left)])
        errors.append(cost.predict_us(left.ops, left.num_bytes) / left.us - 1)
    return Fit(fit(samples), len(samples), tuple(errors))


def _shape(sample: Sample) -> tuple[int, int]:
    return sample.ops, sample.num_bytes


def samples_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Sample]]:
    """Returns kvlink's transfers of random blocks by transport, from rows of `kvlink bench pull` and `bench peers`."""
    found: dict[str, list[Sample]] = defaultdict(list)
    for row in rows:
        transport = row.get("transport") or (row.get("mode") if row.get("peer") == "kvlink" else None)
        if row.get("order", "random") != "random" or row.get("p50_us") is None or "block_bytes" not in row:
            continue
        if isinstance(transport, str):
            blocks, size, us = (number(row, name, 1e15) for name in ("blocks", "block_bytes", "p50_us"))
            found[transport].append(Sample(round(blocks), round(blocks * size), us))
    return found


class Control(NamedTuple):
    """The time of a handoff without its transfer, in µs, and the ends of its error."""

    us: float
    low_us: float
    high_us: float


def control_of(rows: Iterable[Mapping[str, Any]]) -> Control | None:
    """Returns the offer, claim, validation and settle of handoffs that `kvlink bench migrate` measured. None without.

    Requests of several slots wait for each other, so their rows do not count. The ends hold the 95 % intervals of the
    medians of all rows; a row with too few requests for an interval counts from half to twice its time. Raises
    ConfigError.
    """
    alone = [row for row in rows if row.get("kind") == "migrate" and row.get("slots") == 1]
    found = [sum(number(row, f"{part}_us") for part in _CONTROL) for row in alone]
    ends = [_ends(row, us) for row, us in zip(alone, found, strict=True)]
    lows, highs = zip(*ends, strict=True) if ends else ((), ())
    return Control(median(found), min(lows), max(highs)) if found else None


def _ends(row: Mapping[str, Any], us: float) -> tuple[float, float]:
    parts = row.get("parts")
    known = [part for name in _CONTROL if isinstance(part := (parts or {}).get(name), dict)]
    if len(known) < len(_CONTROL) or None in (part.get(end) for part in known for end in _ENDS):
        return _ASSUMED[0] * us, _ASSUMED[1] * us
    low, high = (sum(number(part, end) for part in known) for end in _ENDS)
    return min(low, us), max(high, us)


def fits_of(path: Path) -> dict[str, Fit]:
    """Returns the fit of each transport for which a results file has enough shapes. Raises ConfigError."""
    found = samples_of(read_rows(path))
    enough = {name: samples for name, samples in found.items() if num_shapes(samples) >= LEAST_SHAPES}
    if not enough:
        raise ConfigError(
            f"{path} has no transport of kvlink with transfers of {LEAST_SHAPES} shapes; measure them with "
            "`kvlink bench pull --json` or `kvlink bench peers --json`"
        )
    return {name: cross_validated(samples) for name, samples in enough.items()}
