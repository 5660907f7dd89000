# SPDX-License-Identifier: Apache-2.0
"""Simulates fleets of growing size under the same load per worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..workloads.traces import Request
from .engine import Failure, Fate, Fleet, Outcome, Simulation
from .workload import Move, jobs_of

SIZES = tuple(2**power for power in range(1, 11))
QUANTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """The conditions of every fleet. `load` is the share of the prefill side's rails.

    `popular` is the share of the requests that the first prefill worker gets besides its own. `fails_after` is the
    share of the run after which it loses a rail; None means that it does not.
    """

    load: float
    popular: float = 0.0
    fails_after: float | None = None
    pulls: int = 8
    lease_s: float = 30.0
    seed: int = 0


def rows(move: Move, requests: Sequence[Request], sizes: Sequence[int], scene: Scene) -> Iterator[Row]:
    """Yields one row per fleet; half of its workers prefill. Raises ConfigError."""
    for workers in sizes:
        fleet = Fleet(workers // 2, workers - workers // 2, move.rails(), scene.pulls, scene.lease_s)
        jobs = jobs_of(requests, move, fleet, scene.load, scene.popular, scene.seed)
        if scene.fails_after is not None:
            at_s = jobs[0].at_s + scene.fails_after * (jobs[-1].at_s - jobs[0].at_s)
            fleet = replace(fleet, failures=(Failure(at_s, 0, 0),))
        outcomes = Simulation(fleet, jobs).run()
        yield {
            "kind": "simulation",
            "path": move.path.name,
            "model": move.model.name,
            "tp": move.tp,
            "workers": workers,
            "rails": fleet.rails.count,
            "load": scene.load,
            "popular": scene.popular,
            "fails_after": scene.fails_after,
            "pulls": scene.pulls,
            "lease_s": scene.lease_s,
            "seed": scene.seed,
            **measured(outcomes, fleet),
        }


def measured(outcomes: Sequence[Outcome], fleet: Fleet) -> Row:
    """Returns the results of a fleet.

    Times are those of requests that were moved, and GiB/s is what was moved from the first offer to the last. `busiest`
    is the share that the prefill worker that sent most used of what its rails could have sent until all had ended.
    """
    moved = [each for each in outcomes if each.fate is Fate.MOVED]
    offers = [each.job.at_s for each in outcomes]
    first, last = min(offers), max(offers)
    lasted_s = max(each.job.at_s + each.took_s for each in outcomes) - first
    us = np.array([each.took_s for each in moved]) * 1e6
    times = np.percentile(us, list(QUANTILES.values())).tolist() if len(us) else [None] * len(QUANTILES)
    sent = np.bincount([each.job.prefill for each in outcomes], [each.num_bytes for each in outcomes])
    in_time = sum(each.num_bytes for each in moved if each.job.at_s + each.took_s <= last)
    return {
        "requests": len(outcomes),
        "requests_per_s": len(outcomes) / (last - first),
        **{f"{name}_us": value for name, value in zip(QUANTILES, times, strict=True)},
        "gib_per_s": in_time / 2**30 / (last - first),
        "expired": sum(each.fate is Fate.EXPIRED for each in outcomes),
        "unreachable": sum(each.fate is Fate.UNREACHABLE for each in outcomes),
        "wasted_gib": (float(sent.sum()) - sum(each.num_bytes for each in moved)) / 2**30,
        "busiest": float(sent.max()) / (fleet.rails.count * fleet.rails.send * lasted_s),
    }
