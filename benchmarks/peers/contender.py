# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a way of moving blocks in a contest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..harness.block_draws import Fragmentation
from ..harness.contents import Ids

KVLINK, BARE = "kvlink", "bare"


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
    def order(self) -> Fragmentation:
        """Returns how its blocks may follow each other; the bare socket stream gets one run."""

    def prepare(self, draws: Sequence[Draw]) -> None:
        """Poisons the destination, and prepares what is possible before the blocks are wanted."""

    def move(self) -> Moved:
        """Runs the transfers one after the other. The first, of a single block, only warms up."""

    def wrong(self) -> int:
        """Returns how many of them did not bring every byte."""

    def close(self) -> None:
        """Ends its processes. Idempotent."""
