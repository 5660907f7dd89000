# SPDX-License-Identifier: Apache-2.0
"""Turns the cost model's figures into rails, and a trace's requests into jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import inf

import numpy as np

from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import Cost

from ..prediction.machines import request_of
from ..prediction.path import Path
from ..prediction.path import Request as Shape
from ..workloads.models import BLOCK_TOKENS, Model
from ..workloads.traces import Request
from .engine import Fleet, Job, Rails

_GB = 1e9


@dataclass(frozen=True)
class Move:
    """The move of one model's requests on one path. `tp` ranks on each side share the worker's NICs."""

    model: Model
    tp: int
    path: Path

    def shape(self, tokens: int) -> Shape:
        """Returns the shape in whole blocks, so that every piece has the same size."""
        blocks = -(-tokens // BLOCK_TOKENS)
        return request_of(self.model, blocks * BLOCK_TOKENS, self.tp, BLOCK_TOKENS, 1)

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
    one = request_of(model, BLOCK_TOKENS, tp, BLOCK_TOKENS, 1)
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
