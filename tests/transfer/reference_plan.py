# SPDX-License-Identifier: Apache-2.0
"""Executes a plan slowly: one row after the other, one byte string a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlink import _core
from kvlink.layout import KVLayout, Plane

Bytes = npt.NDArray[np.uint8]


@dataclass
class Pool:
    """A layout with memory behind it, random to begin with."""

    layout: KVLayout
    seed: int
    regions: list[Bytes] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.regions = [random.integers(0, 256, size, np.uint8) for size in self.layout.region_bytes]

    def row(self, plane: Plane, block: int, token: int, head: int) -> Bytes:
        layout = self.layout
        at = plane.offset + block * layout.block_stride + token * layout.token_stride
        at += (head - layout.first_head) * layout.head_stride
        return self.regions[plane.region][at : at + layout.row_bytes]

    def ranges(self) -> list[tuple[int, int]]:
        return [(region.ctypes.data, region.nbytes) for region in self.regions]

    def core_layout(self, layers: range) -> _core.Layout:
        layout = self.layout
        context = layout.context
        return _core.Layout(
            layout.num_blocks,
            layout.block_tokens,
            layout.first_head,
            layout.num_heads,
            layout.row_bytes,
            layout.block_stride,
            layout.token_stride,
            layout.head_stride,
            [(plane.region, plane.layer, plane.offset) for plane in self.planes(layers)],
            (context.rank, context.size, context.interleave),
        )

    def planes(self, layers: range) -> list[Plane]:
        return [plane for plane in self.layout.planes if plane.layer in layers]

    def index_of(self, token: int) -> int | None:
        """Returns the number of a token among those that the blocks hold, or None for one that they do not hold."""
        context = self.layout.context
        held = [at for at in range(token + 1) if at // context.interleave % context.size == context.rank]
        return len(held) - 1 if token in held else None


def copy_rows(
    owner: Pool,
    reader: Pool,
    owner_blocks: Sequence[int],
    reader_blocks: Sequence[int],
    tokens: range,
    layers: range,
    heads: range,
) -> None:
    """Copies into `reader` what a pull of these tokens, layers and heads must bring. Both ends have the layers."""
    for token in tokens:
        their_index, our_index = owner.index_of(token), reader.index_of(token)
        if their_index is None or our_index is None:
            continue
        their_block, their_token = divmod(their_index, owner.layout.block_tokens)
        our_block, our_token = divmod(our_index, reader.layout.block_tokens)
        for theirs, ours in zip(owner.planes(layers), reader.planes(layers), strict=True):
            for head in heads:
                source = owner.row(theirs, owner_blocks[their_block], their_token, head)
                reader.row(ours, reader_blocks[our_block], our_token, head)[:] = source


def apply(plan: _core.Plan, owner: Pool, reader: Pool) -> None:
    """Executes a plan as a transport would, and checks what transports rely on."""
    ops, segments = plan.ops(), plan.segments()
    next_segment = 0
    for op in ops:
        assert op["first_segment"] == next_segment
        next_segment += int(op["num_segments"])
        source = owner.regions[op["region"]][int(op["offset"]) :][: int(op["bytes"])]
        assert source.nbytes == op["bytes"], "the read leaves its region"
        for segment in segments[int(op["first_segment"]) : next_segment]:
            region = reader.regions[segment["region"]]
            start = int(segment["local"]) - region.ctypes.data
            length = int(segment["bytes"])
            assert 0 <= start <= start + length <= region.nbytes, "a segment leaves its region"
            region[start : start + length], source = source[:length], source[length:]
        assert not source.nbytes, "the segments of an op do not add up"
    assert next_segment == len(segments)
    assert int(ops["bytes"].sum()) == plan.bytes
