# SPDX-License-Identifier: Apache-2.0
"""Computes the caches of a migration's two sides: the blocks that its requests need, and the requests that fit."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.errors import ConfigError
from kvlink.layout import Geometry, KVLayout, Order, dense, num_seats
from kvlink.layout.sharding import num_replicas

from .models import BLOCK_TOKENS, model_of

LAYOUTS = {order.name: order for order in (Order.NHD, Order.HND)}
"""The layouts of a rank's cache, by the names that engines use."""

_POOL_BYTES = 2 << 30  # all pools of a side together, at most
_DEGREES = re.compile("([1-9][0-9]{0,2})(?::([1-9][0-9]{0,2}))?")


@dataclass(frozen=True, slots=True)
class Degrees:
    """The parallel degrees of prefill and decode. With `decode` None, one rank's share moves to an equal."""

    prefill: int = 1
    """Tensor-parallel ranks of prefill."""
    decode: int | None = None
    prefill_stages: int = 1
    """Stages of prefill's pipeline."""
    decode_stages: int = 1

    @classmethod
    def parse(cls, text: str, stages: str = "1:1") -> Degrees:
        """Parses a tensor-parallel "8" or "2:4", and a pipeline's "2:1". Raises ConfigError."""
        found = _DEGREES.fullmatch(text)
        if not found:
            raise ConfigError(
                f"TP {text!r} is not known; write 8 for one rank's share, or 2:4 for all ranks of prefill and of decode"
            )
        prefill, decode = int(found[1]), int(found[2]) if found[2] else None
        staged = _DEGREES.fullmatch(stages)
        if not staged or not staged[2]:
            raise ConfigError(
                f"PP {stages!r} is not known; write 2:1 for the stages of prefill and of decode"
            )
        if staged[1] == staged[2] == "1":
            return cls(prefill, decode)
        return cls(prefill, decode or prefill, int(staged[1]), int(staged[2]))

    def __str__(self) -> str:
        """Returns the text that `parse` reads."""
        return str(self.prefill) if self.decode is None else f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True)
class Cache:
    """The caches of a model, given by name or by its config.json. All ranks of a side have the same block ids."""

    model: str
    degrees: Degrees = Degrees()
    block_tokens: int = BLOCK_TOKENS
    order: Order = Order.NHD

    def prefill(self, num_blocks: int) -> list[Geometry]:
        """Returns prefill's geometries, rank by rank. Raises ConfigError."""
        return self._ranks(self.degrees.prefill, self.degrees.prefill_stages, num_blocks)

    def decode(self, num_blocks: int) -> list[Geometry]:
        """Returns decode's geometries, rank by rank. Raises ConfigError."""
        return self._ranks(
            self.degrees.decode or self.degrees.prefill, self.degrees.decode_stages, num_blocks
        )

    def blocks(self, tokens: int) -> int:
        """Returns the blocks of one request at each rank."""
        return -(-tokens // self.block_tokens)

    def most_blocks(self) -> int:
        """Returns the largest number of blocks of each pool."""
        return _POOL_BYTES // self._block_bytes()

    def fitting(self, lengths: Sequence[int]) -> list[int]:
        """Returns the requests that have a prompt and fit. Raises ConfigError if none does."""
        most = self.most_blocks()
        if not any(lengths):
            raise ConfigError("none of these requests has a prompt")
        found = [index for index, tokens in enumerate(lengths) if 0 < self.blocks(tokens) <= most]
        if not found:
            least = min(filter(None, lengths))
            gib = self.blocks(least) * self._block_bytes() / 2**30
            raise ConfigError(
                f"{least} tokens of {self.model} at TP {self.degrees} are {gib:.1f} GiB, and the pools of a side of "
                f"this benchmark have at most {_POOL_BYTES >> 30} GiB; ask for fewer tokens, or for one rank's share "
                "of more ranks"
            )
        return found

    def _ranks(self, size: int, stages: int, num_blocks: int) -> list[Geometry]:
        model = model_of(self.model)
        if self.degrees.decode is None:
            return [model.geometry(size, num_blocks, self.block_tokens)]
        return [
            model.rank(rank, size, num_blocks, self.block_tokens, stage=(stage, stages))
            for stage in range(stages)
            for rank in range(size)
        ]

    def _block_bytes(self) -> int:
        """Returns the bytes of one block at all ranks of the larger side."""
        sides = (self.prefill(1), self.decode(1))
        return max(sum(dense(geometry).block_bytes for geometry in side) for side in sides)


def taken_from(prefill: Sequence[KVLayout], decode: KVLayout) -> str:
    """Returns, in words, how many of prefill's ranks are read, and how many of them hold the same bytes."""
    read = sum(num_seats(layout, decode) > 0 for layout in prefill)
    replicas = num_replicas(prefill[0])
    return f"{read} of {len(prefill)}" + (f", {replicas} hold the same" if replicas > 1 else "")
