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
CONTROL_US = 1200.0
"""A handoff without its transfer, where no results file has one. Assumed; `kvlink bench migrate` measures it."""

_ASSUMED = (0.5, 2.0)  # of costs that were not fitted here


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


def control_us_of(rows: Iterable[Mapping[str, Any]]) -> float:
    """Returns the time of a handoff without its transfer: offer, claim and settle, of rows of `kvlink bench migrate`.

    Requests of several slots wait for each other, so their rows do not count. Without any it is CONTROL_US.
    """
    parts = ("offer_us", "claim_us", "validate_us", "settle_us")
    alone = [row for row in rows if row.get("kind") == "migrate" and row.get("slots") == 1]
    return median(sum(number(row, part) for part in parts) for row in alone) if alone else CONTROL_US


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
