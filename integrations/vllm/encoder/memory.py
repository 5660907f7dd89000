# SPDX-License-Identifier: Apache-2.0
"""Implements the memory that the scheduler's process shares with the workers' processes of its host.

It has four parts: for each rank the number of the last step whose copies have ended, and whether its weights were
changed; for each block a stamp of the step that wrote an item from there on; and the blocks. Each word has one writer,
and stores of words are atomic.
"""

from __future__ import annotations

import mmap
import os
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense

Bytes = npt.NDArray[np.uint8]

_WORD_BYTES = 8
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """The sizes of the memory. It travels to the workers with each step."""

    num_blocks: int
    block_bytes: int
    num_ranks: int

    @property
    def first_block(self) -> int:
        """The offset of block 0."""
        words = (2 * self.num_ranks + self.num_blocks) * _WORD_BYTES
        return -(-words // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def num_bytes(self) -> int:
        """The size of the whole memory."""
        return self.first_block + self.num_blocks * self.block_bytes


class EncoderMemory:
    """One mapping of the memory. The scheduler's process creates it, and it ends with the last process that maps it."""

    def __init__(self, fd: int, shape: MemoryShape) -> None:
        self.shape = shape
        self._mapping = mmap.mmap(fd, shape.num_bytes)
        flat = np.frombuffer(self._mapping, dtype=np.uint8)
        words = flat[: (2 * shape.num_ranks + shape.num_blocks) * _WORD_BYTES].view(np.uint64)
        self.steps = words[: shape.num_ranks]
        """By rank, the last step whose copies have ended."""
        self.changes = words[shape.num_ranks : 2 * shape.num_ranks]
        """By rank, 1 if its weights are others than at the start."""
        self.stamps = words[2 * shape.num_ranks :]
        """By first block of an item, the step that wrote it."""
        self.blocks = flat[shape.first_block :].reshape(shape.num_blocks, shape.block_bytes)

    @classmethod
    def create(cls, shape: MemoryShape) -> tuple[EncoderMemory, int]:
        """Returns zeroed memory and its file descriptor. Raises ConfigError if there is not enough."""
        fd = os.memfd_create("kvlink-encoder-cache")
        try:
            os.posix_fallocate(fd, 0, shape.num_bytes)
            return cls(fd, shape), fd
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"the pool of encoder outputs needs {shape.num_bytes >> 20} MiB of memory: {error.strerror}; lower "
                "pool_mib in ec_connector_extra_config"
            ) from None

    @classmethod
    def open(cls, path: str, shape: MemoryShape) -> EncoderMemory:
        """Maps the memory of the scheduler's process. Raises ConfigError if that runs elsewhere."""
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise ConfigError(
                f"cannot map the pool of encoder outputs at {path}: {error.strerror}; vLLM's scheduler and the "
                "workers of its first stage must run on one host, as one user"
            ) from None
        try:
            return cls(fd, shape)
        finally:
            os.close(fd)

    def pool(self, model: str) -> BlockPool:
        """Returns the blocks as a pool. A block is a token of the layout, and `model` is compared by readers."""
        geometry = Geometry(
            num_layers=1,
            total_heads=1,
            row_bytes=self.shape.block_bytes,
            num_blocks=self.shape.num_blocks,
            block_tokens=1,
            planes_per_layer=1,
            dtype="uint8",
            model=model,
        )
        return BlockPool.from_tensors([self.blocks.reshape(-1)], dense(geometry))

    def write(self, block_ids: array[int], content: Bytes, stamp: int) -> None:
        """Writes the bytes of an item, and then its stamp."""
        ids = np.frombuffer(block_ids, dtype=np.uint32)
        whole, rest = divmod(len(content), self.shape.block_bytes)
        self.blocks[ids[:whole]] = content[: len(content) - rest].reshape(whole, self.shape.block_bytes)
        if rest:
            self.blocks[ids[whole], :rest] = content[len(content) - rest :]
        self.stamps[ids[0]] = stamp

    def read(self, block_ids: array[int], num_bytes: int) -> Bytes:
        """Returns a copy of the bytes of an item."""
        copied: Bytes = self.blocks[np.frombuffer(block_ids, dtype=np.uint32)].reshape(-1)[:num_bytes]
        return copied
