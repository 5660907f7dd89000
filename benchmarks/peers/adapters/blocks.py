# SPDX-License-Identifier: Apache-2.0
"""Fills memory with random blocks that two processes derive from one seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

_WORD_BYTES = 8
_POISON = 0xDEADBEEF_DEADBEEF
_CHUNK_BYTES = 4 << 20  # the unit of comparison, which fits a core's cache


class Blocks:
    """Blocks in which word i of block b is base[i] ^ key[b], all of them random."""

    def __init__(self, block_bytes: int, num_blocks: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.block_bytes, self.num_blocks = block_bytes, num_blocks
        self._base = rng.integers(0, 2**64, block_bytes // _WORD_BYTES, np.uint64)
        self._keys = rng.integers(0, 2**64, num_blocks, np.uint64)
        self._words = np.empty((num_blocks, len(self._base)), np.uint64)
        for block, key in zip(self._words, self._keys, strict=True):
            np.bitwise_xor(self._base, key, out=block)

    @property
    def address(self) -> int:
        """Returns the address of the first byte."""
        return int(self._words.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Returns the size of all blocks."""
        return int(self._words.nbytes)

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """Returns the memory of all blocks."""
        return self._words.view(np.uint8).reshape(-1)

    def move_to(self, memory: npt.NDArray[np.uint8]) -> None:
        """Moves the blocks into `memory`, which has exactly as many bytes."""
        words: npt.NDArray[np.uint64] = memory.view(np.uint64).reshape(self._words.shape)
        words[:] = self._words
        self._words = words

    def poison(self, ids: Ids) -> None:
        """Overwrites blocks with bytes that no transfer brings."""
        for block in ids:
            self._words[block] = _POISON

    def equal(self, ids: Ids, there: Ids) -> bool:
        """Returns whether blocks `ids` hold every byte that `there` hold at the other end."""
        step = max(1, _CHUNK_BYTES // self.block_bytes)
        cuts = (slice(at, at + step) for at in range(0, len(ids), step))
        return all(
            np.array_equal(self._words[ids[cut]], self._base ^ self._keys[there[cut], np.newaxis])
            for cut in cuts
        )
