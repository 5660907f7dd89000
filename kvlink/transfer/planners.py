# SPDX-License-Identifier: Apache-2.0
"""Makes the native planners of reads from one owner, one for each cache group."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink import _core
from kvlink.layout import KVLayout
from kvlink.layout.kv_layout import common_layers
from kvlink.transfer.pool import BlockPool

Planner = _core.Planner


def planners(
    pool: BlockPool,
    owner: Sequence[KVLayout],
    region_bytes: Sequence[int],
    region_index: Sequence[int],
    heads: Sequence[tuple[int, int] | None],
) -> tuple[Planner | None, ...]:
    """Returns, by cache group, a planner of reads from the owner's blocks into `pool`. None for a group without heads.

    `region_bytes` are the sizes of the owner's regions, and `region_index` their indices at the connection.
    Raises LayoutMismatch or ConfigError.
    """
    local_regions = [(region.address, region.num_bytes) for region in pool.regions]
    return tuple(
        None
        if each is None
        else _core.Planner(
            core_layout(ours, common_layers(ours, theirs)),
            core_layout(theirs, common_layers(ours, theirs)),
            local_regions,
            region_bytes,
            region_index,
            each,
        )
        for ours, theirs, each in zip(pool.groups, owner, heads, strict=True)
    )


def core_layout(layout: KVLayout, layers: tuple[int, int] | None = None) -> _core.Layout:
    """Converts a layout, or a range of its layers, to the form of the native planner."""
    return _core.Layout(
        num_blocks=layout.num_blocks,
        block_tokens=layout.block_tokens,
        first_head=layout.first_head,
        num_heads=layout.num_heads,
        row_bytes=layout.row_bytes,
        block_stride=layout.block_stride,
        token_stride=layout.token_stride,
        head_stride=layout.head_stride,
        planes=[
            (plane.region, plane.layer, plane.offset) for plane in layout.planes_of(layers or layout.layers)
        ],
        tokens=(layout.context.rank, layout.context.size, layout.context.interleave),
    )
