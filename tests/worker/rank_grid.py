# SPDX-License-Identifier: Apache-2.0
"""Servers whose ranks share heads, layers and tokens: their pools, and the bytes of every row of a request."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

import numpy as np

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.layout import Context, Geometry, KVLayout, Order, Pipeline, dense

NUM_LAYERS = 4
ROW_BYTES = 8


@dataclass(frozen=True)
class Grid:
    """A server. `stages` are the bounds of its pipeline, `parts` its prefill context parallel size."""

    total_heads: int = 2
    tp_size: int = 1
    stages: tuple[int, ...] = ()
    parts: int = 1
    tp_ranks: int = 1
    interleave: int = 1
    block_tokens: int = 4
    order: Order = Order.NHD

    def layouts(self, num_blocks: int = 24) -> list[KVLayout]:
        """Returns the layouts of all ranks, in order."""
        context = Context(0, self.parts * self.tp_ranks, self.interleave, self.tp_ranks)
        return [
            dense(
                Geometry(
                    NUM_LAYERS,
                    self.total_heads,
                    ROW_BYTES,
                    num_blocks,
                    self.block_tokens,
                    tp_rank=tp,
                    tp_size=self.tp_size,
                    pipeline=Pipeline(stage, self.stages),
                    context=context.at(part, tp),
                ),
                self.order,
            )
            for stage in range(max(1, len(self.stages) - 1))
            for part in range(self.parts)
            for tp in range(self.tp_size)
        ]

    def start(self, stack: ExitStack, name: str, transport: str = "loopback") -> list[Worker]:
        """Starts a worker for each rank, with other bytes in every pool."""
        config = WorkerConfig(transports=transport, lease_slots=64, port=0)
        workers = []
        for rank, layout in enumerate(self.layouts()):
            pool = BlockPool.allocate(layout)
            pool.numpy()[:] = np.random.default_rng([len(name), rank]).integers(
                0, 256, pool.numpy().size, np.uint8
            )
            workers.append(stack.enter_context(Worker(pool, f"{name}{rank}", config=config)))
        return workers


def blocks_of(layout: KVLayout, num_tokens: int, seed: int) -> list[int]:
    """Returns blocks in any order, as many as the rank with most tokens needs."""
    every = Context(0, layout.context.size, layout.context.interleave)
    count = -(-every.num_before(num_tokens) // layout.block_tokens)
    return random.Random(seed).sample(range(layout.num_blocks), count)


def write(memory: np.ndarray, layout: KVLayout, blocks: list[int], tokens: range, layers: range) -> None:
    """Writes what every rank that holds these rows has there."""
    context = layout.context
    held = [at for at in range(tokens.stop) if at // context.interleave % context.size == context.rank]
    by_layer: dict[int, int] = {}
    for plane in layout.planes:
        which = by_layer[plane.layer] = by_layer.get(plane.layer, -1) + 1
        if plane.layer not in layers:
            continue
        for (index, token), head in product(enumerate(held), range(layout.num_heads)):
            if token not in tokens:
                continue
            block, within = divmod(index, layout.block_tokens)
            at = plane.offset + blocks[block] * layout.block_stride
            at += within * layout.token_stride + head * layout.head_stride
            row = (plane.layer, which, token, layout.first_head + head)
            memory[at : at + layout.row_bytes] = np.random.default_rng(row).integers(
                0, 256, layout.row_bytes, np.uint8
            )
