# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a way of moving blocks in a contest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ..harness.block_draws import Order
from ..harness.contents import Ids

Row = Mapping[str, Any]

KVLINK, BARE = "kvlink", "bare"

LEAST_MEMORY_BYTES = 64 << 20  # twice the last-level cache of the machines that run this
_TURN_BYTES = 64 << 20
_MOST_TRANSFERS = 64
_MOST_BLOCKS = 1 << 20  # of a pool that tickets can name


class Shape(NamedTuple):
    """The shape of one transfer."""

    block_bytes: int
    blocks: int
    spare: int = 1
    """How many times as much memory there is as one turn needs."""

    @property
    def num_bytes(self) -> int:
        """Returns the size of one transfer."""
        return self.block_bytes * self.blocks

    @property
    def transfers(self) -> int:
        """Returns the number of timed transfers in one turn."""
        return max(1, min(_TURN_BYTES // self.num_bytes, _MOST_TRANSFERS))

    @property
    def memory_blocks(self) -> int:
        """Returns the number of blocks at each end, enough that no block is used twice in a turn."""
        least = min(LEAST_MEMORY_BYTES // self.block_bytes, _MOST_BLOCKS)
        return max(least, (1 + self.transfers) * self.blocks * self.spare)


class ContenderInfo(NamedTuple):
    """The identity of a contender. `peer` is a library, or BARE. `settings` are those that are not its defaults, and
    their source.
    """

    peer: str
    mode: str
    path: str
    version: str
    settings: str


class Draw(NamedTuple):
    """The blocks of one transfer."""

    there: Ids
    here: Ids


class Moved(NamedTuple):
    """The times of all transfers except the first, and the CPU time of both processes over the same transfers."""

    us: list[float]
    cpu_ns: int


class Contender(Protocol):
    """A way of moving blocks, with its own memory of equal size and random contents. It is used by one thread."""

    info: ContenderInfo

    @property
    def order(self) -> Order:
        """Returns how its blocks may follow each other; the bare socket stream gets one run."""

    def prepare(self, draws: Sequence[Draw]) -> None:
        """Poisons the destination, and prepares what is possible before the blocks are wanted."""

    def move(self) -> Moved:
        """Runs the transfers one after the other. The first, of a single block, only warms up."""

    def wrong(self) -> int:
        """Returns how many of them did not bring every byte."""

    def close(self) -> None:
        """Ends its processes. Idempotent."""


def limit_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """Returns the best of the bare calls that limit `row`. Of two transports on one path, each has its own."""
    cma = is_cma(row)
    alike = [each for each in rows if each["peer"] == BARE and "p50_us" in each and is_cma(each) == cma]
    return min(alike, key=lambda each: float(each["p50_us"]), default=None)


def is_cma(row: Row) -> bool:
    """Returns whether a way reads memory that another library allocated."""
    return str(row.get("mode")).startswith(("process_vm_readv", "cma", "fault+cma"))
