# SPDX-License-Identifier: Apache-2.0
"""Describes the cache of each attention type of a model: where it keeps a request's tokens, and its layout."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvlink.errors import ConfigError
from kvlink.layout import Geometry, KVLayout, Order, Regions, dense

from .support import require, unsupported

Table = tuple[list[int], ...]
"""The block table of a request: the block ids of each attention type, in the order of the cache's allocators."""

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALLOCATOR = (
    "allocate_cache_to_request block_physical_stride block_table blocks_per_sector bytes_per_block cache_dtype "
    "get_write_indices head_dim layer_indices layer_type num_key_value_heads register_cache_tensor tokens_per_page"
)
_PROBE = object()
"""The name of a table for a moment. No request has it."""


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """The cache of the layers of one attention type, which share a block table.

    A request's blocks are an array of slots. Token p is in slot p. Layers with a sliding window keep only the last
    `window` tokens: token p is in slot p % window, so it replaces the token that the window has passed.
    """

    allocator: Any
    window: int | None = None

    def num_slots(self, num_tokens: int) -> int:
        """Returns how many slots are written when `num_tokens` tokens are computed."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def num_blocks(self, num_tokens: int) -> int:
        """Returns how many blocks have these slots."""
        return -(-self.num_slots(num_tokens) // int(self.allocator.tokens_per_page))

    def num_sectors(self, num_tokens: int) -> int:
        """Returns how many sectors have these blocks. Attention types share the cache by sectors."""
        return -(-self.num_blocks(num_tokens) // int(self.allocator.blocks_per_sector))


def check_served(attention_types: Iterable[str]) -> None:
    """Raises ConfigError, naming the attention types that handoffs do not support."""
    others = sorted({*attention_types} - {_FULL, _SLIDING})
    if others:
        raise ConfigError(
            f"handoffs support {_FULL} and {_SLIDING}, and this model also has {', '.join(others)}"
        )


def attention_caches(allocators: Mapping[str, Any]) -> tuple[AttentionCache, ...]:
    """Returns the caches of the allocators. No batch may run meanwhile.

    Raises ConfigError for attention types that are not supported, and for allocators that keep tokens in other slots.
    """
    check_served(allocators)
    caches = []
    for name, allocator in allocators.items():
        required = _ALLOCATOR + (" sliding_window" if name == _SLIDING else "")
        require(type(allocator).__name__, allocator, required)
        cache = AttentionCache(allocator, allocator.sliding_window if name == _SLIDING else None)
        _check_slots(cache)
        caches.append(cache)
    return tuple(caches)


def blocks_of(caches: Sequence[AttentionCache], table: Table, num_tokens: int) -> list[array[int]]:
    """Returns the blocks of a table that are written when `num_tokens` tokens are computed."""
    return [
        array("I", blocks[: cache.num_blocks(num_tokens)])
        for cache, blocks in zip(caches, table, strict=True)
    ]


def completed(caches: Sequence[AttentionCache], num_cached: int, num_tokens: int) -> dict[str, int]:
    """Returns, by attention type, how many blocks become full when a prefix of `num_cached` tokens has grown."""
    pages = {cache.allocator.layer_type: int(cache.allocator.tokens_per_page) for cache in caches}
    return {name: num_tokens // page - num_cached // page for name, page in pages.items()}


def by_group(each: list[Any]) -> Any:
    """Returns one value for each cache in the form that a pool takes: a list, or for one cache its value."""
    return each if len(each) > 1 else each[0]


def layouts_of(caches: Sequence[AttentionCache], cache_tensor: Any, model: str) -> list[KVLayout]:
    """Returns the layout of each cache: per block, per layer, K of all slots, then V of all slots. Raises ConfigError.

    The window is in the dtype, which both ends must share, so that rings of different sizes are refused.
    """
    num_bytes = cache_tensor.numel() * cache_tensor.element_size()
    return [_layout(cache, num_bytes, model) for cache in caches]


def _layout(cache: AttentionCache, num_bytes: int, model: str) -> KVLayout:
    allocator = cache.allocator
    dtype = allocator.cache_dtype
    layout = dense(
        Geometry(
            num_layers=len(allocator.layer_indices),
            total_heads=allocator.num_key_value_heads,
            row_bytes=allocator.head_dim * dtype.itemsize,
            # Block ids count from the start of the tensor, which has blocks that are never exported.
            num_blocks=num_bytes // allocator.bytes_per_block,
            block_tokens=allocator.tokens_per_page,
            dtype=str(dtype).removeprefix("torch."),
            model=model,
        ),
        Order.CROSS_LAYER_NHD,
        Regions.ONE,
    )
    if layout.block_bytes != allocator.bytes_per_block:
        raise unsupported(
            [f"a block of K and V ({allocator.bytes_per_block} bytes, not {layout.block_bytes})"]
        )
    planes = tuple(replace(plane, layer=allocator.layer_indices[plane.layer]) for plane in layout.planes)
    ring = f" in a ring of {cache.window} tokens" if cache.window is not None else ""
    return replace(layout, planes=planes, dtype=layout.dtype + ring)


def _check_slots(cache: AttentionCache) -> None:
    """Raises ConfigError unless the allocator writes tokens to the slots that `AttentionCache` describes."""
    allocator, page = cache.allocator, int(cache.allocator.tokens_per_page)
    window = cache.window or 4 * page
    tokens = {0, page - 1, page, window - 1, window, window + 1, 3 * window + page // 2}
    table = [3 * block + 2 for block in range(cache.num_blocks(max(tokens) + 1))]
    allocator.block_table[_PROBE] = table
    try:
        for token in sorted(tokens):
            slot = token if cache.window is None else token % cache.window
            wanted = table[slot // page] * allocator.block_physical_stride + slot % page
            if list(allocator.get_write_indices(_PROBE, token, 1)) != [wanted]:
                raise unsupported([f"{type(allocator).__name__} with token {token} in slot {slot}"])
    finally:
        del allocator.block_table[_PROBE]
