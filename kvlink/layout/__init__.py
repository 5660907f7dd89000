# SPDX-License-Identifier: Apache-2.0
"""Describes where a worker's KV blocks are in memory.

A layout has five axes: layer, K or V, block, token, head. A row is the K (or V) of one head of one token, in contiguous
bytes. `dense` nests the axes in an order that an engine uses, and `from_strides` describes existing memory.
A model whose layers have caches of several shapes has a sequence of layouts over the same regions, one for each cache
group, and lists of block ids to match. Ranks share heads (tensor parallel), layers (pipeline) and tokens (context
parallel); `assign` says what a reader takes from which rank.
"""

from __future__ import annotations

from kvlink.layout.geometry import Axis, Geometry, Order, Regions, dense, from_strides
from kvlink.layout.kv_layout import KVLayout, Plane
from kvlink.layout.sharding import (
    Assignment,
    GroupsAssignment,
    Share,
    assign,
    assign_groups,
    heads_of,
    num_seats,
    owner_ranks,
    rank_of,
)
from kvlink.layout.split import ALL_LAYERS, ALL_TOKENS, Context, Pipeline

__all__ = [
    "ALL_LAYERS",
    "ALL_TOKENS",
    "Assignment",
    "Axis",
    "Context",
    "Geometry",
    "GroupsAssignment",
    "KVLayout",
    "Order",
    "Pipeline",
    "Plane",
    "Regions",
    "Share",
    "assign",
    "assign_groups",
    "dense",
    "from_strides",
    "heads_of",
    "num_seats",
    "owner_ranks",
    "rank_of",
]
