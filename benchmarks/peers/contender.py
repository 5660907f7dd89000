# SPDX-License-Identifier: Apache-2.0
"""Defines the interface of a way of moving blocks in a contest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvlink.layout import Geometry

from ..harness.block_draws import Order
from ..harness.contents import Ids
from ..harness.owner import flat, stacked
from ..workloads.suites import Point

Row = Mapping[str, Any]

KVLINK, BARE = "kvlink", "bare"

LEAST_MEMORY_BYTES = 64 << 20  # twice the last-level cache of the machines that run this
_TURN_BYTES = 64 << 20
_MOST_TRANSFERS = 64
_MOST_BLOCKS = 1 << 20  # of a pool that tickets can name


class Draw(NamedTuple):
    """The blocks of one transfer: of each of its requests, those of each cache group."""

    there: Sequence[Sequence[Ids]]
    here: Sequence[Sequence[Ids]]
    entries: Sequence[int]
    """How many rows of each group a request has. Its last block may hold more."""


class Shape(NamedTuple):
    """The shape of one transfer: `requests` requests that move together, each with `entries` rows of every group.

    `geometries` are the cache groups of the pool at each end. `name` has what identifies the shape in results.
    """

    geometries: tuple[Geometry, ...]
    entries: tuple[int, ...]
    requests: int
    transfers: int
    """How many timed transfers one turn has."""
    name: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Returns the size of one transfer."""
        pairs = zip(self.geometries, self.entries, strict=True)
        return self.requests * sum(planes_of(each) * rows * each.row_bytes for each, rows in pairs)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Returns how many blocks a request has in each group."""
        pairs = zip(self.geometries, self.entries, strict=True)
        return tuple(-(-rows // each.block_tokens) for each, rows in pairs)

    @property
    def pieces(self) -> int:
        """Returns how many pieces a transfer has if none of its blocks adjoin."""
        pairs = zip(self.geometries, self.blocks, strict=True)
        return self.requests * sum(planes_of(each) * blocks for each, blocks in pairs)

    @property
    def pool_bytes(self) -> int:
        """Returns the size of the pool at each end."""
        return stacked(self.geometries)[-1].region_bytes[0]

    def draws(self, order: Order, rng: np.random.Generator, transfers: int) -> list[Draw]:
        """Draws the blocks of a turn. The first draw has one block of each group, or one run, and only warms up."""
        pairs = list(zip(self.geometries, self.blocks, strict=True))
        room = min(
            (order.runs_in(each.num_blocks) - 1) // (order.runs_of(blocks) * self.requests)
            for each, blocks in pairs
        )
        count = max(1, min(transfers, room)) * self.requests

        def drawn() -> list[tuple[Ids, ...]]:
            sizes = ([order.run, *[blocks] * count] for _, blocks in pairs)
            lists = [
                order.draw(rng, each.num_blocks, size) for (each, _), size in zip(pairs, sizes, strict=True)
            ]
            return list(zip(*lists, strict=True))

        there, here = drawn(), drawn()
        cuts = (slice(at, at + self.requests) for at in range(1, 1 + count, self.requests))
        first = Draw(there[:1], here[:1], [order.run * each.block_tokens for each in self.geometries])
        return [first, *(Draw(there[cut], here[cut], self.entries) for cut in cuts)]

    def tour(self) -> Iterator[list[Draw]]:
        """Yields turns that together have every block of every group, each at the same place at both ends."""
        pairs = [
            (each.num_blocks, blocks * self.requests)
            for each, blocks in zip(self.geometries, self.blocks, strict=True)
        ]
        count = max(-(-of // size) for of, size in pairs)
        draws = [self._at([min(number * size, of - size) for of, size in pairs]) for number in range(count)]
        for at in range(0, count, 1 + self.transfers):
            yield draws[at : at + 1 + self.transfers]

    def _at(self, starts: Sequence[int]) -> Draw:
        ids = [
            [
                np.arange(start + number * blocks, start + (number + 1) * blocks, dtype=np.uint32)
                for start, blocks in zip(starts, self.blocks, strict=True)
            ]
            for number in range(self.requests)
        ]
        return Draw(ids, ids, self.entries)


def planes_of(geometry: Geometry) -> int:
    """Returns how many arrays of blocks a cache group has. A block has one head in each."""
    return geometry.num_layers * geometry.planes_per_layer


def of_blocks(block_bytes: int, blocks: int, spare: int = 1) -> Shape:
    """Returns a request of blocks without a structure. `spare`: how many times as much memory there is as a turn
    needs.
    """
    num_bytes = block_bytes * blocks
    transfers = max(1, min(_TURN_BYTES // num_bytes, _MOST_TRANSFERS))
    least = min(LEAST_MEMORY_BYTES // block_bytes, _MOST_BLOCKS)
    geometry = flat(block_bytes, max(least, (1 + transfers) * blocks * spare))
    return Shape((geometry,), (blocks,), 1, transfers, {"block_bytes": block_bytes, "blocks": blocks})


def of_burst(suite: str, point: Point, requests: int) -> Shape:
    """Returns a burst of a public suite."""
    name = {
        "suite": suite, "workload": point.workload, "tokens": point.tokens, "page_tokens": point.page_tokens,
        "requests": requests,
    }  # fmt: skip
    entries = tuple(group.entries for group in point.groups)
    return Shape(tuple(point.geometries(requests)), entries, requests, 1, name)


class ContenderInfo(NamedTuple):
    """The identity of a contender. `peer` is a library, or BARE. `settings` are those that are not its defaults, and
    their source.
    """

    peer: str
    mode: str
    path: str
    version: str
    settings: str


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
