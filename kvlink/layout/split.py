# SPDX-License-Identifier: Apache-2.0
"""Describes how ranks split the layers and the tokens of a cache, besides its heads. Pure values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd

from kvlink.errors import ConfigError

MAX_RANKS = 1_024
"""Bounds the ranks of one server, and so its stages and the ranks that share tokens."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stage of a pipeline that a rank runs. By default there is one stage, which has all layers."""

    rank: int = 0
    """Counted from 0."""
    bounds: tuple[int, ...] = ()
    """The first layer of each stage, from 0 on, and then the number of layers. Empty for a single stage."""

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field, for stages that no model has."""
        bounds = self.bounds
        if bounds and not (bounds[0] == 0 and all(first < end for first, end in pairwise(bounds))):
            raise ConfigError(f"pipeline: bounds must rise from 0 on, and not be {bounds!r:.80}")
        if len(bounds) == 1 or self.size > MAX_RANKS or (bounds and bounds[-1] >= 2**32):
            raise ConfigError(
                f"pipeline: bounds must have 2 to {MAX_RANKS + 1} numbers below 2^32: the first layer of each stage, "
                f"and the number of layers, not {bounds!r:.80}"
            )
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"pipeline: there is no stage {self.rank}, because there are {self.size}")

    @classmethod
    def even(cls, rank: int, size: int, num_layers: int) -> Pipeline:
        """Splits layers as vLLM does: evenly, and what remains to the stages before the last one."""
        if not 1 <= size <= num_layers:
            raise ConfigError(f"pipeline: {num_layers} layers cannot be split into {size} stages")
        if size == 1:
            return cls(rank)
        counts = [num_layers // size] * size
        for stage in range(size - 1 - num_layers % size, size - 1):
            counts[stage] += 1
        return cls(rank, tuple(sum(counts[:stage]) for stage in range(size + 1)))

    @property
    def size(self) -> int:
        """The number of stages."""
        return max(1, len(self.bounds) - 1)

    def layers(self, num_layers: int) -> tuple[int, int]:
        """Returns the half-open range of layers of this stage. A single stage has `num_layers` of them."""
        return self.bounds[self.rank : self.rank + 2] if self.bounds else (0, num_layers)  # type: ignore[return-value]

    def meets(self, other: Pipeline) -> bool:
        """Returns whether both stages have a layer in common."""
        if not self.bounds or not other.bounds:
            return True
        first, end = self.layers(0)
        other_first, other_end = other.layers(0)
        return max(first, other_first) < min(end, other_end)


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens that a rank holds of every request. By default it holds all of them.

    Ranks share tokens in turn: the first `interleave` tokens are those of rank 0, the next ones of rank 1, and after
    the last rank it is the turn of rank 0 again. The blocks of a rank hold its own tokens without gaps.
    """

    rank: int = 0
    size: int = 1
    """The number of ranks that share the tokens."""
    interleave: int = 1
    """Tokens that follow each other at one rank."""
    tp_ranks: int = 1
    """How many of the ranks are neighbouring tensor-parallel ranks with the same heads: vLLM's decode context parallel
    size. The others are ranks besides the tensor-parallel ones: size = prefill context parallel size x tp_ranks."""

    def __post_init__(self) -> None:
        """Raises ConfigError, naming the field, for a share that no rank has."""
        if not 1 <= self.size <= MAX_RANKS or not 0 <= self.rank < self.size:
            raise ConfigError(f"context: rank {self.rank} of size {self.size} cannot share tokens")
        if not 1 <= self.interleave < 2**32:
            raise ConfigError(f"context: interleave must be in 1 to 2^32 - 1, not {self.interleave}")
        if self.tp_ranks < 1 or self.size % self.tp_ranks:
            raise ConfigError(f"context: tp_ranks={self.tp_ranks} must divide size={self.size}")

    @property
    def num_parts(self) -> int:
        """The number of ranks that share tokens and have the same tensor-parallel rank."""
        return self.size // self.tp_ranks

    def at(self, part: int, tp_rank: int) -> Context:
        """Returns the share of another rank."""
        return replace(self, rank=part * self.tp_ranks + tp_rank % self.tp_ranks)

    def num_before(self, position: int) -> int:
        """Returns how many of the tokens before `position` this rank holds."""
        turns, rest = divmod(position, self.size * self.interleave)
        return turns * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def num_fitting(self, capacity: int) -> int:
        """Returns the tokens of the longest request that fits if every rank has room for `capacity` tokens."""
        return capacity // self.interleave * self.interleave * self.size + capacity % self.interleave

    def meets(self, other: Context) -> bool:
        """Returns whether both ranks hold a token in common, in a request that is long enough."""
        period = gcd(self.size * self.interleave, other.size * other.interleave)
        distance = (other.rank * other.interleave - self.rank * self.interleave) % period
        return distance < self.interleave or period - distance < other.interleave


ALL_LAYERS = Pipeline()
ALL_TOKENS = Context()
