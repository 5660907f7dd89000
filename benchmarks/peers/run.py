# SPDX-License-Identifier: Apache-2.0
"""Runs all contests of `kvlink bench peers`, and judges them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from kvlink.errors import ConfigError

from . import contest
from .contender import Shape
from .modes import NOT_RUN, PATHS

_BLOCK_BYTES, _BLOCKS = (4 << 10, 16 << 10, 64 << 10), (256, 4096)
SHAPES = (*(Shape(size, blocks) for size in _BLOCK_BYTES for blocks in _BLOCKS), Shape(16 << 10, 1))
"""The shapes that the promises refer to."""

_MOST_BYTES = 512 << 20  # of one transfer; every contender has twice that at each end
_WORD_BYTES = 8


def shapes(block_bytes: Sequence[int] | None, blocks: Sequence[int] | None) -> list[Shape]:
    """Returns every size with every number, or SHAPES by default. Raises ConfigError."""
    if not block_bytes and not blocks:
        return list(SHAPES)
    found = [Shape(size, number) for size in block_bytes or _BLOCK_BYTES for number in blocks or _BLOCKS]
    for shape in found:
        if shape.block_bytes % _WORD_BYTES or shape.num_bytes > _MOST_BYTES:
            raise ConfigError(
                f"{shape.blocks} blocks of {shape.block_bytes} bytes cannot be measured: a block needs a multiple of "
                f"{_WORD_BYTES} bytes, and a transfer at most {_MOST_BYTES >> 20} MiB"
            )
    return found


def checked(path: str, block_bytes: Sequence[int] | None, blocks: Sequence[int] | None) -> list[Shape]:
    """As `shapes`. Raises ConfigError also for an unknown path."""
    if unknown := sorted(set(path.split(",")) - set(PATHS)):
        raise ConfigError(f"no path is called {unknown[0]!r}; choose from {', '.join(PATHS)}")
    return shapes(block_bytes, blocks)


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
