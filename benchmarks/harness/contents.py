# SPDX-License-Identifier: Apache-2.0
"""Makes random bytes that two processes derive from one seed, so that a reader can compare every byte it pulled."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, KVLayout
from kvlink.errors import ConfigError

Ids = npt.NDArray[np.uint32]

_WORD = np.dtype(np.uint64)
_POISON = 0xDEADBEEF_DEADBEEF
_CHUNK_BYTES = 4 << 20  # the unit of comparison, which fits a core's cache


class Contents:
    """The contents of a pool with the layout of `dense` in Order.NHD or HND and Regions.ONE: plane by plane, block by
    block, from the offset of its first plane on.

    Word i of block b of plane p is base[i] ^ key[p, b], all of them random. The same heads and layers have the same
    words at every rank of a model.
    """

    def __init__(self, layout: KVLayout, seed: int) -> None:
        self._heads_apart = layout.head_stride > layout.token_stride
        by_rows = self._heads_apart or layout.num_heads < layout.total_heads
        if (layout.row_bytes if by_rows else layout.block_stride) % _WORD.itemsize:
            raise ConfigError(
                f"blocks of {layout.block_stride} bytes, rows of {layout.row_bytes}: a benchmark needs multiples of "
                f"{_WORD.itemsize}"
            )
        rng = np.random.default_rng(seed)
        self._layout = layout
        self._shape = (len(layout.planes), layout.num_blocks, layout.block_stride // _WORD.itemsize)
        whole = rng.integers(0, 2**64, self._shape[2] // layout.num_heads * layout.total_heads, np.uint64)
        self._base = self._of_rank(whole) if by_rows else whole
        (first, end), all_layers = layout.layers, layout.total_layers
        per_layer = len(layout.planes) // (end - first)
        keys = rng.integers(0, 2**64, (all_layers * per_layer, layout.num_blocks), np.uint64)
        self._keys = keys[first * per_layer : end * per_layer]

    def fill(self, pool: BlockPool) -> None:
        """Writes every block."""
        for blocks, keys in zip(self._words(pool), self._keys, strict=True):
            for block, key in zip(blocks, keys, strict=True):
                np.bitwise_xor(self._base, key, out=block)

    def poison(self, pool: BlockPool, ids: Ids) -> None:
        """Overwrites blocks with bytes that no pull brings."""
        for blocks in self._words(pool):
            blocks[ids] = _POISON

    def equal(self, pool: BlockPool, ids: Ids, owner_ids: Ids, num_tokens: int | None = None) -> bool:
        """Returns whether blocks `ids` of `pool` hold what `owner_ids` hold at the owner: every byte of every plane.

        `num_tokens` None means all that the blocks hold; the last block may be partial.
        """
        block_tokens = self._layout.block_tokens
        tokens = num_tokens if num_tokens is not None else len(ids) * block_tokens
        full, rest = divmod(tokens, block_tokens)
        step = max(1, _CHUNK_BYTES // self._layout.block_stride)
        cuts = [(slice(at, min(at + step, full)), block_tokens) for at in range(0, full, step)]
        cuts += [(slice(full, full + 1), rest)] if rest else []
        return all(
            np.array_equal(
                self._first(blocks[ids[cut]], end),
                self._first(self._base ^ keys[owner_ids[cut], np.newaxis], end),
            )
            for blocks, keys in zip(self._words(pool), self._keys, strict=True)
            for cut, end in cuts
        )

    def _of_rank(self, whole: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """Returns this rank's part of a block's words of all heads, with tokens outermost."""
        layout = self._layout
        rows = whole.reshape(layout.block_tokens, layout.total_heads, -1)
        held = rows[:, layout.first_head : layout.first_head + layout.num_heads]
        return (held.swapaxes(0, 1) if self._heads_apart else held).ravel()

    def _first(self, blocks: npt.NDArray[np.uint64], tokens: int) -> npt.NDArray[np.uint64]:
        """Returns the words of the first `tokens` of each block."""
        if tokens == self._layout.block_tokens:
            return blocks
        if self._heads_apart:
            return blocks.reshape(len(blocks), self._layout.num_heads, self._layout.block_tokens, -1)[
                :, :, :tokens
            ]
        return blocks[:, : blocks.shape[1] * tokens // self._layout.block_tokens]

    def _words(self, pool: BlockPool) -> npt.NDArray[np.uint64]:
        words = self._shape[0] * self._shape[1] * self._shape[2]
        first = self._layout.planes[0].offset // _WORD.itemsize
        return pool.numpy().view(_WORD)[first : first + words].reshape(self._shape)


def filled(layout: KVLayout, gpu: int, seed: int) -> BlockPool:
    """Returns a pool on a GPU with the bytes of Contents for `seed`. Raises ConfigError without torch."""
    torch = torch_with_gpu()
    on_host = BlockPool.allocate(layout)
    Contents(layout, seed).fill(on_host)
    pool = BlockPool.allocate(layout, gpu=gpu)
    for region in range(len(pool.regions)):
        pool.torch(region).copy_(on_host.torch(region))
    torch.cuda.synchronize(gpu)
    return pool


def torch_with_gpu() -> Any:
    """Returns the torch module. Raises ConfigError without torch or without a GPU."""
    try:
        import torch
    except ImportError:
        raise ConfigError("work on the GPU needs torch here; run pip install torch") from None
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no GPU here; run on a machine with a GPU, and install a CUDA build of torch"
        )
    return torch
