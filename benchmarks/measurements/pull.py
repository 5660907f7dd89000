# SPDX-License-Identifier: Apache-2.0
"""Measures a pull between two processes, in turns with the limit of the same path: a contest without other libraries.

The time of kvlink is what a Python caller sees with a ticket and a warm connection: from `worker.pull` until `wait`
returns, so plan, read, validate and settle. The limit is the fastest of the bare ways, which copy the same blocks on
one thread and on as many as kvlink may use. Every destination is poisoned before its pull and compared after it, both
outside of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from kvlink.errors import ConfigError

from ..harness.baselines import references_of
from ..harness.block_draws import Order
from ..harness.options import use_cpus
from ..harness.owner import memory_for
from ..harness.results import verified
from ..harness.statistics import histogram, quantiles_us
from ..peers.contender import Contender, Shape, of_blocks
from ..peers.contest import Score, check, held
from ..peers.here import Kvlink

_BLOCK_BYTES, _BLOCKS = (16 << 10, 64 << 10), 4096
SHAPES = (*((size, _BLOCKS) for size in _BLOCK_BYTES), (16 << 10, 1), (4 << 10, 256), (64 << 10, 256))
"""The (block_bytes, blocks) of the rows by default: those of the performance bars, and enough to fit a cost model."""

_SMALL_BYTES = 1 << 20
_SMALL_ITERS, _LARGE_ITERS = 2000, 100
_MOST_BYTES = 512 << 20
_WORD_BYTES = 8
_SPARE = 4  # for orders of blocks that need room
_REFERENCES = 3
_SEED = 20_250_101


def shapes(block_bytes: Sequence[int] | None, blocks: int | None) -> list[tuple[int, int]]:
    """Returns the (block_bytes, blocks) of each row, or SHAPES by default."""
    if not block_bytes and blocks is None:
        return list(SHAPES)
    return [(size, blocks or _BLOCKS) for size in block_bytes or _BLOCK_BYTES]


def rows(
    transport: str,
    block_bytes: int,
    blocks: int,
    iters: int | None = None,
    order: str = "random",
    memory: str = "",
) -> Iterator[dict[str, Any]]:
    """Yields one row. `iters` None fits the size. `order` is parsed by Order, `memory` by memory_for.

    Raises ConfigError, BenchError and TransferError.
    """
    kind = memory_for(transport, memory)
    if block_bytes * blocks > _MOST_BYTES or block_bytes % _WORD_BYTES:
        raise ConfigError(
            f"{blocks} blocks of {block_bytes} bytes cannot be measured: a block needs a multiple of {_WORD_BYTES} "
            f"bytes, and a pull at most {_MOST_BYTES >> 20} MiB; ask for fewer blocks"
        )
    shape = of_blocks(block_bytes, blocks, 1 if order == "random" else _SPARE)
    most = iters or (_SMALL_ITERS if shape.num_bytes <= _SMALL_BYTES else _LARGE_ITERS)
    with closing(Kvlink(transport, transport, shape, _SEED, kind, Order.parse(order, blocks))) as ours:
        bare = list(ours.bare())
        ways: list[Contender] = [ours, *bare]
        scores = held(ways, shape, np.random.default_rng(_SEED), lambda score: most - len(score.us))
        us = _referred(ours, block_bytes, blocks, transport)
        for each in bare:
            each.close()
    check(ways, scores)
    yield {
        "transport": transport,
        "block_bytes": block_bytes,
        "blocks": blocks,
        "bytes": shape.num_bytes,
        "iters": len(scores[0].us),
        "order": order,
        "memory": kind,
        "cpus": use_cpus(""),
        **_times(shape, scores[0], dict(zip((way.info.mode for way in bare), scores[1:], strict=True)), us),
        **verified(scores[0].wrong, len(scores[0].us), len(scores[0].us)),
    }


def _referred(ours: Kvlink, block_bytes: int, blocks: int, transport: str) -> dict[str, list[float]]:
    """Lets perftest measure, over as many lanes as pulls of this size have; beside one block, also a bare read."""
    lanes = ours.lanes if block_bytes * blocks > _SMALL_BYTES else 1
    references = references_of(transport, block_bytes, blocks, lanes)
    found = {each.name: [each.run() for _ in range(_REFERENCES)] for each in references}
    return found | ({"bare read": [ours.bare_read_us()]} if found and blocks == 1 else {})


def _times(
    shape: Shape, ours: Score, bare: dict[str, Score], references: dict[str, list[float]]
) -> dict[str, Any]:
    """Returns the times of kvlink and of the limit, and the CPU time of both."""
    p50, gib = float(np.median(ours.us)), shape.num_bytes / 2**30
    read = references.pop("bare read", None)
    medians = {name: float(np.median(us)) for name, us in references.items()}
    medians |= {name: float(np.median(score.us)) for name, score in bare.items()}
    nothing = (float("nan"), "none: perftest measures verbs")
    limit_us, limit = min(((us, name) for name, us in medians.items()), default=nothing)
    cpu_s = ours.cpu_ns / 1e9 / len(ours.us)
    return {
        "min_us": min(ours.us),
        **quantiles_us(ours.us),
        "p50_us": p50,
        "histogram_us": histogram(ours.us),
        "gib_per_s": gib / (p50 / 1e6),
        "limit": limit,
        "limit_us": limit_us,
        "limit_gib_per_s": gib / (limit_us / 1e6),
        "of_limit": limit_us / p50,
        "overhead_us": p50 - limit_us,
        "limits_us": medians,
        "cpu_s_per_gib": cpu_s / gib,
        "cpu_of_limit": bare[limit].cpu_ns / 1e9 / len(bare[limit].us) / cpu_s
        if limit in bare and cpu_s
        else None,
        **({"bare_read_us": float(np.median(read))} if read else {}),
    }
