# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache in its smallest form: an allocator that scatters, and copies in and out of blocks."""

from __future__ import annotations

import hashlib
import random

import torch

BLOCK_TOKENS = 16
NUM_BLOCKS = 256
POISON = 0xFF
"""As a float every poisoned value is NaN, so one block that was not pulled turns all later tokens wrong."""


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` tokens; the last may be partial."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockAllocator:
    """Hands out block ids in random order, as a pool does that has served requests for a while."""

    def __init__(self, num_blocks: int, seed: str) -> None:
        self._random = random.Random(seed)
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Raises MemoryError when fewer are free."""
        if num_blocks > len(self._free):
            raise MemoryError(f"{num_blocks} blocks wanted, {len(self._free)} free")
        self._random.shuffle(self._free)
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return taken

    def free(self, block_ids: list[int]) -> None:
        """Gives blocks back."""
        self._free.extend(block_ids)


class PagedPlanes:
    """The planes of a pool, K and V of layer 0 first: each (num_blocks, BLOCK_TOKENS, heads, head_dim)."""

    def __init__(self, planes: list[torch.Tensor]) -> None:
        self._planes = planes

    def write(self, tokens_by_plane: list[torch.Tensor], block_ids: list[int]) -> None:
        """Stores (tokens, heads, head_dim) of every plane into blocks."""
        blocks, rows = _slots(block_ids, len(tokens_by_plane[0]))
        for plane, tokens in zip(self._planes, tokens_by_plane, strict=True):
            plane[blocks, rows] = tokens

    def read(self, block_ids: list[int], num_tokens: int) -> list[torch.Tensor]:
        """Copies every plane's (num_tokens, heads, head_dim) out of blocks."""
        blocks, rows = _slots(block_ids, num_tokens)
        return [plane[blocks, rows] for plane in self._planes]

    def poison(self, block_ids: list[int]) -> None:
        """Fills blocks with POISON."""
        for plane in self._planes:
            plane.view(torch.uint8)[block_ids] = POISON

    def digest(self, block_ids: list[int], num_tokens: int) -> str:
        """Equal on both sides exactly if every byte of every token is; block ids do not matter."""
        digest = hashlib.blake2b(digest_size=16)
        for tokens in self.read(block_ids, num_tokens):
            digest.update(tokens.contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _slots(block_ids: list[int], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    token = torch.arange(num_tokens)
    return torch.tensor(block_ids)[token // BLOCK_TOKENS], token % BLOCK_TOKENS
