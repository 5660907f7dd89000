# SPDX-License-Identifier: Apache-2.0
"""Runs all contests of `kvlink bench peers`, and judges them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import IO, Any

from kvlink.errors import ConfigError

from ..workloads.suites import Suite
from . import contest
from .contender import Shape, of_blocks, of_burst
from .modes import NOT_RUN, PATHS

_BLOCK_BYTES, _BLOCKS = (4 << 10, 16 << 10, 64 << 10), (256, 4096)
SHAPES = (*product(_BLOCK_BYTES, _BLOCKS), (16 << 10, 1))
"""The (block_bytes, blocks) that the promises refer to."""

_MOST_BYTES = 512 << 20  # of one transfer; every contender has twice that at each end
_WORD_BYTES = 8


def shapes(block_bytes: Sequence[int] | None, blocks: Sequence[int] | None) -> list[Shape]:
    """Returns every size with every number, or those of SHAPES by default. Raises ConfigError."""
    wanted = product(block_bytes or _BLOCK_BYTES, blocks or _BLOCKS) if block_bytes or blocks else SHAPES
    found = []
    for size, number in wanted:
        if size % _WORD_BYTES or size * number > _MOST_BYTES:
            raise ConfigError(
                f"{number} blocks of {size} bytes cannot be measured: a block needs a multiple of {_WORD_BYTES} bytes, "
                f"and a transfer at most {_MOST_BYTES >> 20} MiB"
            )
        found.append(of_blocks(size, number))
    return found


def bursts(suite: Suite, pool_bytes: int) -> list[Shape]:
    """Returns the bursts of a suite for which pools of `pool_bytes` are large enough. Raises ConfigError for none."""
    every = (of_burst(suite.name, point, batch) for point in suite.points for batch in point.batches)
    found = [shape for shape in every if shape.pool_bytes <= pool_bytes]
    if not found:
        raise ConfigError("a pool for the smallest burst is larger than --pool-gib")
    return found


def check_paths(path: str) -> None:
    """Raises ConfigError for an unknown path."""
    if unknown := sorted(set(path.split(",")) - set(PATHS)):
        raise ConfigError(f"no path is called {unknown[0]!r}; choose from {', '.join(PATHS)}")


def open_log(log: Path | None, environments: Path) -> IO[str]:
    """Opens the file that gets the output of the peers. Without one it is in `environments`, or dropped."""
    if log is None and not environments.is_dir():
        return open(os.devnull, "w")  # noqa: PTH123
    return (log or environments / "log").open("w")


def contests(
    path: str, wanted: Iterable[Shape], seconds: float, environments: Path, log: IO[str]
) -> list[Iterable[dict[str, Any]]]:
    """Returns the peers without a contest, then the rows of each contest, which runs when they are iterated."""
    absent = [
        {"peer": peer, "mode": mode, "path": "any", "why_not": why} for (peer, mode), why in NOT_RUN.items()
    ]
    held = [
        contest.rows(name, shape, seconds, environments.absolute(), log)
        for name in path.split(",")
        for shape in wanted
    ]
    return [absent, *held]
