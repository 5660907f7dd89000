# SPDX-License-Identifier: Apache-2.0
"""Chooses where a cache is: on a CPU in memory that other processes of the host may map, elsewhere where it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlink import BlockPool
from kvlink.layout import KVLayout


def pool_of(cache: Any, layouts: Sequence[KVLayout]) -> BlockPool:
    """Returns the cache as a pool. Requires that no batch runs.

    An empty cache on a CPU moves, so that peers may also read it by shm. One in use is exported where it is.
    """
    if cache.cache_tensor.device.type != "cpu" or _is_in_use(cache):
        return BlockPool.from_tensors([cache.cache_tensor], layouts)
    pool = BlockPool.allocate(layouts)
    trash_bytes = 2 * cache.bytes_per_sector
    cache.cache_tensor = pool.torch()
    for allocator in cache.cache_allocators.values():
        allocator.register_cache_tensor(
            cache.bytes_per_sector, cache.cache_tensor.numel() - trash_bytes, cache.cache_tensor, cache.pool
        )
    return pool


def _is_in_use(cache: Any) -> bool:
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    return bool(cache.pool.num_free_sectors != cache.num_sectors)
