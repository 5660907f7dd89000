# SPDX-License-Identifier: Apache-2.0
"""Describes where a worker's KV blocks are in memory.

A layout has five axes: layer, K or V, block, token, head. A row is the K (or V) of one head of one token, in contiguous
bytes. `dense` nests the axes in an order that an engine uses, and `from_strides` describes existing memory.
A model whose layers have caches of several shapes has a sequence of layouts over the same regions, one for each cache
group, and lists of block ids to match. kvlink.sharding decides which heads a reader takes from which rank.
"""

from __future__ import annotations

from kvlink.layout.geometry import Axis, Geometry, Order, Regions, dense, from_strides
from kvlink.layout.kv_layout import KVLayout, Plane
from kvlink.sharding import Assignment, GroupsAssignment, assign, assign_groups, heads_of, num_seats

__all__ = [
    "Assignment",
    "Axis",
    "Geometry",
    "GroupsAssignment",
    "KVLayout",
    "Order",
    "Plane",
    "Regions",
    "assign",
    "assign_groups",
    "dense",
    "from_strides",
    "heads_of",
    "num_seats",
]
