# SPDX-License-Identifier: Apache-2.0
"""Treats the layouts of a pool's cache groups together. They describe the same regions, and may overlap there."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.errors import ConfigError
from kvlink.layout.kv_layout import KVLayout
from kvlink.layout.sharding import rank_of

MAX_GROUPS = 256

Groups = Sequence[KVLayout]


def checked_groups(layout: KVLayout | Groups) -> tuple[KVLayout, ...]:
    """Returns the layouts of a pool, one for each cache group. Raises ConfigError unless they can share a pool."""
    groups = (layout,) if isinstance(layout, KVLayout) else tuple(layout)
    if not 1 <= len(groups) <= MAX_GROUPS:
        raise ConfigError(
            f"a pool has 1 to {MAX_GROUPS} layouts, one for each cache group, not {len(groups)}"
        )
    for index, group in enumerate(groups):
        if not isinstance(group, KVLayout):
            raise ConfigError(f"layout {index} of the pool is a {type(group).__name__}, not a KVLayout")
        shares = [(rank_of(each), each.tp_rank, each.tp_size) for each in (group, groups[0])]
        if shares[0] != shares[1]:
            raise ConfigError(
                f"cache group {index} is of rank {_named(group)}, group 0 of rank {_named(groups[0])}; a pool belongs "
                "to one rank"
            )
    return groups


def _named(group: KVLayout) -> str:
    rank, num_ranks = rank_of(group)
    return f"{rank} of {num_ranks} (tensor-parallel {group.tp_rank} of {group.tp_size})"


def region_bytes(groups: Groups) -> tuple[int, ...]:
    """Returns the bytes that each pool region must have, in region order."""
    sizes = [group.region_bytes for group in groups]
    needed = [0] * max(map(len, sizes))
    for each in sizes:
        for region, num_bytes in enumerate(each):
            needed[region] = max(needed[region], num_bytes)
    return tuple(needed)


def difference(ours: Groups, theirs: Groups) -> str | None:
    """Describes the first field that shows that `theirs` are caches of a different model. None if they fit."""
    if len(ours) != len(theirs):
        return f"the number of cache groups differs: {len(ours)} here, {len(theirs)} there"
    for index, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        found = our.difference(their)
        if found is not None:
            return found if len(ours) == 1 else f"cache group {index}: {found}"
    return None
