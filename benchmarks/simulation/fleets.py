# SPDX-License-Identifier: Apache-2.0
"""Turns the cost model's figures into rails and a trace's requests into jobs, and simulates fleets of growing size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

import numpy as np

from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import Cost

from ..harness.statistics import quantiles_us
from ..prediction.paths import Path, request_of
from ..prediction.paths import Request as Shape
from ..workloads.block_budget import Degrees
from ..workloads.models import BLOCK_TOKENS, Model
from ..workloads.traces import Request
from .engine import Fate, Fleet, Job, Outcome, Rails, Simulation

_GB = 1e9
SIZES = tuple(2**power for power in range(1, 11))

Row = dict[str, Any]


@dataclass(frozen=True)
class Move:
    """The move of one model's requests on one path. `tp` ranks on each side share the worker's NICs."""

    model: Model
    tp: int
    path: Path

    def shape(self, tokens: int) -> Shape:
        """Returns the shape in whole blocks, so that every piece has the same size."""
        blocks = -(-tokens // BLOCK_TOKENS)
        return request_of(self.model, blocks * BLOCK_TOKENS, Degrees(self.tp), BLOCK_TOKENS, 1)

    def alone_s(self, tokens: int) -> float:
        """Returns the time without any other request."""
        return self.path.predict(self.shape(tokens)).total_ms / 1e3

    def start_s(self, tokens: int) -> float:
        """Returns the part of that time in which no rail is busy."""
        shape = self.shape(tokens)
        return self.alone_s(tokens) - max(self.path.terms_ms(shape).values()) / 1e3

    def rails(self) -> Rails:
        """Returns the bytes/s that each stage of the cost model allows for this piece size. Posting is the reader's."""
        path, shape = self.path, self.shape(1)
        piece = shape.num_bytes / shape.pieces
        send = min(path.wire_gbps, path.bus_gbps(), piece / path.rail_ns if path.rail_ns else inf)
        receive = min(send, piece / path.post_ns if path.post_ns else inf)
        flow = piece * path.window / (path.round_trip_us * 1e3) if path.window else inf
        return Rails(path.rails, send * _GB, receive * _GB, flow * _GB)


def path_of(name: str, cost: Cost, model: Model, tp: int) -> Path:
    """Returns a measured transport as a path, with one rail per rank at the cost model's rate for these pieces."""
    one = request_of(model, BLOCK_TOKENS, Degrees(tp), BLOCK_TOKENS, 1)
    piece = one.num_bytes / one.pieces
    ns = cost.op_ns + piece / (cost.gib_per_s * 2**30 / _GB)
    return Path(name, tp, piece / ns, cost.start_us, 0.0)


def jobs_of(
    requests: Sequence[Request], move: Move, fleet: Fleet, load: float, popular: float, seed: int
) -> list[Job]:
    """Returns requests at their own times, stretched so that the prefill workers send `load` of what their rails carry.

    Workers are drawn at random. The share `popular` of all requests goes to the first prefill worker, the rest to any.
    Raises ConfigError.
    """
    taken = [request for request in requests if request.prompt_tokens]
    if not taken or taken[-1].at_s <= taken[0].at_s:
        raise ConfigError("a simulation needs requests with prompts, at two different times at least")
    rng = np.random.default_rng(seed)
    prefill = rng.integers(fleet.prefill, size=len(taken))
    prefill[rng.random(len(taken)) < popular] = 0
    decode = rng.integers(fleet.decode, size=len(taken))
    size, start = cache(lambda tokens: move.shape(tokens).num_bytes), cache(move.start_s)
    total = sum(size(request.prompt_tokens) for request in taken)
    lasts_s = total / (load * fleet.prefill * fleet.rails.count * fleet.rails.send)
    stretch = lasts_s / (taken[-1].at_s - taken[0].at_s)
    return [
        Job(
            request.at_s * stretch,
            size(request.prompt_tokens),
            start(request.prompt_tokens),
            int(sender),
            int(reader),
        )
        for request, sender, reader in zip(taken, prefill, decode, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Scene:
    """The conditions of every fleet. `load` is the share of the prefill side's rails.

    `popular` is the share of the requests that the first prefill worker gets besides its own.
    """

    load: float
    popular: float = 0.0
    pulls: int = 8
    lease_s: float = 30.0
    seed: int = 0


def rows(move: Move, requests: Sequence[Request], sizes: Sequence[int], scene: Scene) -> Iterator[Row]:
    """Yields one row per fleet; half of its workers prefill. Raises ConfigError."""
    for workers in sizes:
        fleet = Fleet(workers // 2, workers - workers // 2, move.rails(), scene.pulls, scene.lease_s)
        jobs = jobs_of(requests, move, fleet, scene.load, scene.popular, scene.seed)
        outcomes = Simulation(fleet, jobs).run()
        yield {
            "path": move.path.name,
            "model": move.model.name,
            "tp": move.tp,
            "workers": workers,
            "rails": fleet.rails.count,
            "load": scene.load,
            "popular": scene.popular,
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
    times = quantiles_us([each.took_s * 1e6 for each in moved])
    sent = np.bincount([each.job.prefill for each in outcomes], [each.num_bytes for each in outcomes])
    in_time = sum(each.num_bytes for each in moved if each.job.at_s + each.took_s <= last)
    return {
        "requests": len(outcomes),
        "requests_per_s": len(outcomes) / (last - first),
        **{name: us for name, us in times.items() if not name.endswith(("_low_us", "_high_us"))},
        "gib_per_s": in_time / 2**30 / (last - first),
        "expired": sum(each.fate is Fate.EXPIRED for each in outcomes),
        "wasted_gib": (float(sent.sum()) - sum(each.num_bytes for each in moved)) / 2**30,
        "busiest": float(sent.max()) / (fleet.rails.count * fleet.rails.send * lasted_s),
    }
