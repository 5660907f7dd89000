# SPDX-License-Identifier: Apache-2.0
"""Draws the blocks of a transfer: fresh ones each time, from a pool several times larger than the transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlink.errors import ConfigError

from .contents import Ids


@dataclass(frozen=True, slots=True)
class Order:
    """Blocks in runs of `run` contiguous ones, at random places."""

    run: int = 1

    @classmethod
    def parse(cls, text: str, blocks: int) -> Order:
        """Parses "random" or "runs:K", with at most `blocks` per run. Raises ConfigError."""
        if text == "random":
            return cls(1)
        kind, _, run = text.partition(":")
        if kind != "runs" or not run.isascii() or not run.isdigit() or int(run) < 1:
            raise ConfigError(f"order {text!r} is not known; write random, or runs:K for runs of K blocks")
        return cls(min(int(run), blocks))

    def whole_runs(self, least: int) -> int:
        """Returns the smallest number of blocks, at least `least`, that whole runs fill."""
        return self.runs_of(least) * self.run

    def runs_of(self, blocks: int) -> int:
        """Returns how many runs `blocks` blocks take, the last of them perhaps in part."""
        return -(-blocks // self.run)

    def runs_in(self, pool_blocks: int) -> int:
        """Returns how many runs a pool has, of which `draw` uses each once."""
        return pool_blocks // self.run

    def draw(self, rng: np.random.Generator, pool_blocks: int, sizes: Sequence[int]) -> list[Ids]:
        """Returns a list of ids for each of `sizes`, all different."""
        ends = np.cumsum([self.runs_of(size) for size in sizes])
        runs = rng.permutation(self.runs_in(pool_blocks))[: ends[-1]].astype(np.uint32)
        ids = runs[:, np.newaxis] * np.uint32(self.run) + np.arange(self.run, dtype=np.uint32)
        return [
            np.ascontiguousarray(part.ravel()[:size])
            for part, size in zip(np.split(ids, ends[:-1]), sizes, strict=True)
        ]


def pieces_of(
    from_ids: Ids, to_ids: Ids, block_bytes: int, from_base: int, to_base: int
) -> npt.NDArray[np.uint64]:
    """Returns rows of (from address, to address, bytes). Blocks that are contiguous at both ends are merged."""
    starts = np.flatnonzero(np.concatenate(([True], (np.diff(from_ids) != 1) | (np.diff(to_ids) != 1))))
    counts = np.diff(np.append(starts, len(from_ids)))
    size = np.uint64(block_bytes)
    columns = (
        from_ids[starts].astype(np.uint64) * size + np.uint64(from_base),
        to_ids[starts].astype(np.uint64) * size + np.uint64(to_base),
        counts.astype(np.uint64) * size,
    )
    return np.ascontiguousarray(np.stack(columns, axis=1))
