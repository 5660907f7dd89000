# SPDX-License-Identifier: Apache-2.0
"""Measures bursts of requests that are pulled together, as the workloads of public suites have them (suites.py): a
contest (../peers) of kvlink and the bare ways.

The time of a burst is from the call of its first pull until the last of them has its bytes: all are started, then all
are waited for. As with those suites, the reader has the tickets before, and the coordinator takes no part. Every burst
has a new random block table at both ends. The limit is the fastest of the bare ways, which copy the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from statistics import median_low
from typing import Any

import numpy as np

from ..harness.results import verified
from ..harness.statistics import histogram, quantiles_us
from ..peers.contender import KVLINK, Contender, Shape, of_burst
from ..peers.contest import Score, check, held
from ..peers.here import Kvlink
from ..workloads.suites import Point, Suite

Row = dict[str, Any]

_SEED = 20_261_128


def rows(suite: Suite, point: Point, transport: str, pool_bytes: int) -> Iterator[Row]:
    """Yields a row for each size of a burst, and one for the smallest for which pools of `pool_bytes` are too small.

    Raises BenchError and TransferError.
    """
    for batch in point.batches:
        shape = of_burst(suite.name, point, batch)
        common: Row = {"peer": KVLINK, "mode": transport, **shape.name}
        if shape.pool_bytes > pool_bytes:
            why = f"this and larger bursts need {shape.pool_bytes / 2**30:.2g} GiB or more at each end (--pool-gib)"
            yield common | {"why_not": why}
            return
        with closing(Kvlink(transport, transport, shape, _SEED)) as ours:
            yield common | _row(suite, shape, ours)


def _row(suite: Suite, shape: Shape, ours: Kvlink) -> Row:
    """Measures bursts in turns with the bare ways. Each trial begins with bursts that do not count."""
    ways: list[Contender] = [ours, *ours.bare()]
    scores, rng = [Score() for _ in ways], np.random.default_rng(_SEED)
    for _ in range(suite.trials):
        for score, more in zip(
            scores, held(ways, shape, rng, lambda score: suite.bursts - len(score.us)), strict=True
        ):
            score.add(more)
    for way in ways[1:]:
        way.close()
    check(ways, scores)
    score, gib = scores[0], shape.num_bytes / 2**30
    p50 = median_low(score.us)
    row: Row = {
        "bytes": shape.num_bytes,
        "pieces": shape.pieces,
        **quantiles_us(score.us),
        "histogram_us": histogram(score.us),
        "gib_per_s": gib / (p50 / 1e6),
        "cpu_s_per_gib": score.cpu_ns / 1e9 / gib / len(score.us),
        "iters": len(score.us),
        **verified(score.wrong, len(score.us), len(score.us)),
    }
    limits = {way.info.mode: median_low(score.us) for way, score in zip(ways[1:], scores[1:], strict=True)}
    if limits:
        limit = min(limits, key=limits.__getitem__)
        row |= {"limit": limit, "limit_us": limits[limit], "of_limit": limits[limit] / p50}
    return row
