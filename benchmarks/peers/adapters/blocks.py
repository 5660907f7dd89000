# SPDX-License-Identifier: Apache-2.0
"""Fills memory with random blocks that two processes derive from one seed."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]

_WORD = np.dtype(np.uint64)
_POISON = 0xDEADBEEF_DEADBEEF
_CHUNK_BYTES = 4 << 20  # the unit of comparison, which fits a core's cache


class _Group:
    """Blocks of one size, of which the first has the number `first`. Word i of block b is base[i] ^ key[b]."""

    def __init__(
        self, rng: np.random.Generator, first: int, num_blocks: int, block_bytes: int, start: int
    ) -> None:
        self.numbers, self.start, self.block_bytes = range(first, first + num_blocks), start, block_bytes
        self._base = rng.integers(0, 2**64, block_bytes // _WORD.itemsize, np.uint64)
        self._keys = rng.integers(0, 2**64, num_blocks, np.uint64)

    @property
    def num_bytes(self) -> int:
        return len(self.numbers) * self.block_bytes

    def place(self, memory: npt.NDArray[np.uint8]) -> None:
        part = memory[self.start : self.start + self.num_bytes]
        self.words: npt.NDArray[np.uint64] = part.view(_WORD).reshape(len(self.numbers), -1)

    def fill(self) -> None:
        for block, key in zip(self.words, self._keys, strict=True):
            np.bitwise_xor(self._base, key, out=block)

    def equal(self, ids: Ids, there: Ids) -> bool:
        step = max(1, _CHUNK_BYTES // self.block_bytes)
        cuts = (slice(at, at + step) for at in range(0, len(ids), step))
        return all(
            np.array_equal(self.words[ids[cut]], self._base ^ self._keys[there[cut], np.newaxis])
            for cut in cuts
        )


class Blocks:
    """Groups of blocks of one size each, one group after the other in one memory. All blocks are counted in turn.

    `groups` has the number of blocks and the bytes of a block of each group.
    """

    def __init__(self, groups: Sequence[Sequence[int]], seed: int) -> None:
        rng, first, end = np.random.default_rng(seed), 0, 0
        self._groups: list[_Group] = []
        for num_blocks, block_bytes in groups:
            self._groups.append(_Group(rng, first, num_blocks, block_bytes, end))
            first += num_blocks
            end = -(-(end + num_blocks * block_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.num_blocks = first
        memory = mmap.mmap(-1, end)
        memory.madvise(mmap.MADV_HUGEPAGE)  # as kvlink's measurements of cma ask for
        self._place(np.frombuffer(memory, np.uint8))
        for group in self._groups:
            group.fill()

    @property
    def address(self) -> int:
        """Returns the address of the first byte."""
        return int(self._memory.ctypes.data)

    @property
    def num_bytes(self) -> int:
        """Returns the size of the memory."""
        return int(self._memory.nbytes)

    def starts(self) -> npt.NDArray[np.uint64]:
        """Returns where each block begins, in bytes from `address`."""
        return np.concatenate(
            [
                np.uint64(group.start)
                + np.arange(len(group.numbers), dtype=np.uint64) * np.uint64(group.block_bytes)
                for group in self._groups
            ]
        )

    def sizes(self) -> npt.NDArray[np.uint64]:
        """Returns the bytes of each block."""
        return np.concatenate(
            [np.full(len(group.numbers), group.block_bytes, np.uint64) for group in self._groups]
        )

    def as_bytes(self) -> npt.NDArray[np.uint8]:
        """Returns the memory of all blocks."""
        return self._memory

    def by_group(self, ids: Ids) -> Iterator[tuple[npt.NDArray[np.uint64], Ids]]:
        """Yields the words of each group's blocks, a row for each block, and which rows `ids` are."""
        for group in self._groups:
            yield group.words, _within(group, ids)

    def move_to(self, memory: npt.NDArray[np.uint8]) -> None:
        """Moves the blocks into `memory`, which has exactly as many bytes."""
        memory[:] = self._memory
        self._place(memory)

    def poison(self, ids: Ids) -> None:
        """Overwrites blocks with bytes that no transfer brings."""
        for words, rows in self.by_group(ids):
            words[rows] = _POISON

    def equal(self, ids: Ids, there: Ids) -> bool:
        """Returns whether blocks `ids` hold every byte that `there`, of the same groups, hold at the other end."""
        return all(group.equal(_within(group, ids), _within(group, there)) for group in self._groups)

    def _place(self, memory: npt.NDArray[np.uint8]) -> None:
        self._memory = memory
        for group in self._groups:
            group.place(memory)


def _within(group: _Group, ids: Ids) -> Ids:
    found: Ids = ids[(ids >= group.numbers.start) & (ids < group.numbers.stop)] - group.numbers.start
    return found
