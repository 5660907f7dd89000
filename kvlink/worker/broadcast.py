# SPDX-License-Identifier: Apache-2.0
"""Decides who reads from whom when one request goes to many workers. Pure."""

from __future__ import annotations

from kvlink.errors import ConfigError

ROOT = -1
"""The first owner, in a list of parents."""


def broadcast_parents(num_readers: int, num_batches: int = 64, fanout: int | None = None) -> list[int]:
    """Returns for each reader the reader that it reads from, or -1 for the first owner.

    Each worker sends its batches to its own readers one after the other, and receives while it sends. A tree in which
    each worker has k readers therefore takes k times (depth + number of batches - 1) times of one batch. A chain, where
    k is 1, is best for many batches, and wider trees for few. Links are taken to be equal, and to carry both directions
    at once.

    num_batches: the bytes of the request divided by the `batch_bytes` of `Worker.relay`, whose default makes 64.
    fanout: the number of readers of each worker, instead of the best one.
    """
    if num_readers < 1 or num_batches < 1 or (fanout is not None and fanout < 1):
        raise ConfigError("a broadcast needs at least one reader, one batch and a fan-out of 1")
    widest = range(1, num_readers + 1)
    each = min(widest, key=lambda k: steps(num_readers, num_batches, k)) if fanout is None else fanout
    return [(reader - each) // each if reader >= each else ROOT for reader in range(num_readers)]


def steps(num_readers: int, num_batches: int, fanout: int) -> int:
    """Returns the time until all readers have all batches, in times of one batch over one link."""
    return fanout * (depth(num_readers, fanout) + num_batches - 1)


def depth(num_readers: int, fanout: int) -> int:
    """Returns the number of links between the first owner and the farthest reader."""
    levels, reached, width = 0, 0, 1
    while reached < num_readers:
        width *= fanout
        reached += width
        levels += 1
    return levels


def readers_of(parents: list[int], reader: int) -> list[int]:
    """Returns the readers that read from `reader`, or from the first owner for -1."""
    return [child for child, parent in enumerate(parents) if parent == reader]
