# SPDX-License-Identifier: Apache-2.0
"""Random bytes that two processes know from one seed, so that a reader can compare every byte it pulled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, KVLayout
from kvlink.errors import ConfigError

Ids = npt.NDArray[np.uint32]

_WORD = np.dtype(np.uint64)
_POISON = 0xDEADBEEF_DEADBEEF
_CHUNK_BYTES = 4 << 20  # compared at a time: what a core's cache holds


class Contents:
    """Of a pool laid out by `dense` in Order.NHD and Regions.ONE: plane after plane, block after block.

    Word i of block b of plane p is base[i] ^ key[p, b], all of them random.
    """

    def __init__(self, layout: KVLayout, seed: int) -> None:
        if layout.block_stride % _WORD.itemsize:
            raise ConfigError(
                f"blocks of {layout.block_stride} bytes: a benchmark needs a multiple of {_WORD.itemsize}"
            )
        rng = np.random.default_rng(seed)
        self._shape = (len(layout.planes), layout.num_blocks, layout.block_stride // _WORD.itemsize)
        self._base = rng.integers(0, 2**64, self._shape[2], np.uint64)
        self._keys = rng.integers(0, 2**64, self._shape[:2], np.uint64)
        self._token_words = layout.block_stride // layout.block_tokens / _WORD.itemsize

    def fill(self, pool: BlockPool) -> None:
        """Writes every block."""
        for blocks, keys in zip(self._words(pool), self._keys, strict=True):
            for block, key in zip(blocks, keys, strict=True):
                np.bitwise_xor(self._base, key, out=block)

    def poison(self, pool: BlockPool, ids: Ids) -> None:
        """Overwrites blocks with what no pull brings."""
        for blocks in self._words(pool):
            for block in ids:
                blocks[block] = _POISON

    def equal(self, pool: BlockPool, ids: Ids, owner_ids: Ids, num_tokens: int | None = None) -> bool:
        """Whether blocks `ids` of `pool` hold what `owner_ids` hold at the owner: every byte of every plane.

        num_tokens: all that the blocks hold when not given; the last block may be partial.
        """
        words = self._shape[2]
        tokens = num_tokens if num_tokens is not None else round(len(ids) * words / self._token_words)
        full, rest = divmod(round(tokens * self._token_words), words)
        step = max(1, _CHUNK_BYTES // (words * _WORD.itemsize))
        cuts = [(slice(at, min(at + step, full)), words) for at in range(0, full, step)]
        cuts += [(slice(full, full + 1), rest)] if rest else []
        return all(
            np.array_equal(blocks[ids[cut], :end], self._base[:end] ^ keys[owner_ids[cut], np.newaxis])
            for blocks, keys in zip(self._words(pool), self._keys, strict=True)
            for cut, end in cuts
        )

    def _words(self, pool: BlockPool) -> npt.NDArray[np.uint64]:
        words = self._shape[0] * self._shape[1] * self._shape[2]
        return pool.numpy().view(_WORD)[:words].reshape(self._shape)
