# SPDX-License-Identifier: Apache-2.0
"""One rank's cache in a migration: how many blocks its requests need, and which of them it has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense

from .models import BLOCK_TOKENS, model_of

_POOL_BYTES = 2 << 30  # of each of the two pools, at most


class Cache(NamedTuple):
    """Of a model, by its name or the path of its config.json."""

    model: str
    tp: int = 1
    block_tokens: int = BLOCK_TOKENS

    def geometry(self, num_blocks: int) -> Geometry:
        """One rank's share. Raises ConfigError."""
        return model_of(self.model).geometry(self.tp, num_blocks, self.block_tokens)

    def blocks(self, tokens: int) -> int:
        """Of one request."""
        return -(-tokens // self.block_tokens)

    def most_blocks(self) -> int:
        """Of one pool."""
        return _POOL_BYTES // dense(self.geometry(1)).block_bytes

    def fitting(self, lengths: Sequence[int]) -> list[int]:
        """Which of the requests have a prompt and find room. Raises ConfigError when none does."""
        most = self.most_blocks()
        if not any(lengths):
            raise ConfigError("none of these requests has a prompt")
        found = [index for index, tokens in enumerate(lengths) if 0 < self.blocks(tokens) <= most]
        if not found:
            least = min(filter(None, lengths))
            gib = self.blocks(least) * dense(self.geometry(1)).block_bytes / 2**30
            raise ConfigError(
                f"{least} tokens of {self.model} at TP {self.tp} are {gib:.1f} GiB, "
                f"and a pool of this benchmark has at most {_POOL_BYTES >> 30} GiB; ask for fewer tokens or more ranks"
            )
        return found
