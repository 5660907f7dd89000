# SPDX-License-Identifier: Apache-2.0
"""Pools of three cache groups that share their pages: attention, and two kinds of state. And what a pull must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transports.pools import Contents, rows

from kvlink import BlockPool
from kvlink.layout import KVLayout, Plane, heads_of

NUM_LAYERS = 2
ROW_BYTES = (24, 12, 40)
"""The bytes of a row of attention, of a convolution's state, and of a recurrent state."""


@dataclass(frozen=True)
class MixedSpec:
    """One rank's pool. Layer n of every group is in region n; a page holds a block of either kind."""

    block_tokens: int = 4
    total_heads: tuple[int, int, int] = (2, 8, 4)
    tp_rank: int = 0
    tp_size: int = 1
    num_pages: int = 24

    def layouts(self) -> tuple[KVLayout, ...]:
        heads = [heads_of(total, self.tp_rank, self.tp_size) for total in self.total_heads]
        held = [end - first for first, end in heads]
        sizes = [count * row for count, row in zip(held, ROW_BYTES, strict=True)]
        page = max(2 * self.block_tokens * sizes[0], sizes[1] + sizes[2]) + 8

        def group(index: int, offsets: Sequence[int], tokens: int) -> KVLayout:
            return KVLayout(
                model="mixed",
                dtype="uint8",
                block_tokens=tokens,
                total_heads=self.total_heads[index],
                first_head=heads[index][0],
                num_heads=held[index],
                row_bytes=ROW_BYTES[index],
                block_stride=page,
                token_stride=sizes[index],
                head_stride=ROW_BYTES[index],
                num_blocks=self.num_pages,
                planes=tuple(
                    Plane(layer, layer, offset) for layer in range(NUM_LAYERS) for offset in offsets
                ),
                tp_rank=self.tp_rank,
                tp_size=self.tp_size,
                is_state=index > 0,
            )

        values = self.block_tokens * sizes[0]
        return group(0, (0, values), self.block_tokens), group(1, (0,), 1), group(2, (sizes[1],), 1)

    def make(self) -> BlockPool:
        return BlockPool.allocate(self.layouts(), huge_pages=False)


def whole_model(spec: MixedSpec, num_tokens: int, seed: int) -> list[np.ndarray]:
    """The rows of a request by group, shape [planes, tokens or states, heads of the model, row_bytes]."""
    random = np.random.default_rng(seed)
    shapes = [
        (len(layout.planes), 1 if layout.is_state else num_tokens, layout.total_heads, layout.row_bytes)
        for layout in spec.layouts()
    ]
    return [random.integers(0, 256, shape, np.uint8) for shape in shapes]


def write(
    regions: Contents,
    layouts: Sequence[KVLayout],
    ids: Sequence[Sequence[int]],
    model: Sequence[np.ndarray],
    ranges: Sequence[tuple[int, int]],
) -> None:
    """Puts the rows of a request that a rank holds where its block ids say."""
    for layout, blocks, values, (first, end) in zip(layouts, ids, model, ranges, strict=True):
        heads = range(layout.first_head, layout.first_head + layout.num_heads)
        for plane, of_plane in zip(layout.planes, values, strict=True):
            if first < end:
                at = rows(layout, plane, blocks, range(first, end), heads)
                regions[plane.region][at] = of_plane[first:end, heads.start : heads.stop]


def whole(layouts: Sequence[KVLayout], num_tokens: int) -> list[tuple[int, int]]:
    return [(0, 1) if layout.is_state else (0, num_tokens) for layout in layouts]
