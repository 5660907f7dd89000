# SPDX-License-Identifier: Apache-2.0
"""What every way of moving blocks is to a contest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ..harness.block_draws import Fragmentation
from ..harness.contents import Ids

KVLINK, BARE = "kvlink", "bare"


class Who(NamedTuple):
    """`peer` is a library, or BARE. `settings` are those that are not its defaults, and who recommends them."""

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
    """Times of all transfers but the first; CPU time of both processes over the same ones."""

    us: list[float]
    cpu_ns: int


class Contender(Protocol):
    """Its own memory, of as many blocks as everybody's, with random contents. One thread."""

    who: Who

    @property
    def order(self) -> Fragmentation:
        """How its blocks may follow each other; the bare socket stream is given one run."""

    def prepare(self, draws: Sequence[Draw]) -> None:
        """Poisons the destination and makes ready what may be ready before the blocks are wanted."""

    def move(self) -> Moved:
        """Runs the transfers one after the other. The first, of a single block, only warms up."""

    def wrong(self) -> int:
        """How many of them did not bring every byte."""

    def close(self) -> None:
        """Idempotent."""
