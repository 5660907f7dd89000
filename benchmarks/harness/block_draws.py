# SPDX-License-Identifier: Apache-2.0
"""Draws the blocks of a transfer: fresh ones each time, from a pool several times larger than the transfer."""

from __future__ import annotations

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
        return -(-least // self.run) * self.run

    def lists_in(self, pool_blocks: int, blocks: int) -> int:
        """Returns how many lists `draw` can make."""
        return pool_blocks // self.run // -(-blocks // self.run)

    def draw(self, rng: np.random.Generator, pool_blocks: int, num: int, blocks: int) -> list[Ids]:
        """Returns `num` lists of `blocks` ids, all different."""
        runs_each = -(-blocks // self.run)
        runs = rng.permutation(pool_blocks // self.run)[: num * runs_each].astype(np.uint32)
        ids = runs[:, np.newaxis] * np.uint32(self.run) + np.arange(self.run, dtype=np.uint32)
        return [np.ascontiguousarray(row[:blocks]) for row in ids.reshape(num, -1)]


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
