# SPDX-License-Identifier: Apache-2.0
"""Computes which heads a tensor-parallel rank holds and from which rank a reader gets them. Pure functions only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlink.errors import ConfigError


class Sharded(Protocol):
    """The share of a model that one rank holds. KVLayout and Geometry implement it."""

    @property
    def total_heads(self) -> int:
        """KV heads of the whole model, 1 for MLA."""

    @property
    def tp_rank(self) -> int:
        """Tensor-parallel rank, counted from 0."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The heads that one reader takes from one owner, and the seat that it uses there."""

    heads: tuple[int, int]
    """A half-open range of the model's heads. Each head of the reader comes from exactly one owner."""
    seat: int
    """Index into Ticket.seats. No other rank of the reader uses the same seat."""
    num_seats: int
    """The number of seats that the owner's ticket must have: `offer(…, readers=num_seats)`."""


@dataclass(frozen=True, slots=True)
class GroupsAssignment:
    """The heads of several cache groups that one reader takes from one owner, and the seat that it uses there."""

    heads: tuple[tuple[int, int] | None, ...]
    """By cache group, a half-open range of the model's heads, or None if the reader takes none of them here."""
    seat: int
    num_seats: int


def heads_of(total_heads: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Returns the half-open range of heads that a rank holds: an equal share, or one head shared with its neighbours.

    Raises ConfigError if neither `total_heads` nor `tp_size` divides the other, or if there is no such rank.
    """
    if total_heads < 1 or not 0 <= tp_rank < tp_size:
        raise ConfigError(f"tp_rank {tp_rank} of tp_size {tp_size} cannot share {total_heads} total_heads")
    if total_heads % tp_size and tp_size % total_heads:
        raise ConfigError(f"tp_size {tp_size} and {total_heads} total_heads: one must divide the other")
    first = tp_rank * total_heads // tp_size
    return first, first + max(1, total_heads // tp_size)


def num_replicas(share: Sharded) -> int:
    """Returns how many ranks hold the same heads as this one, itself included. Their numbers are consecutive."""
    return max(1, share.tp_size // share.total_heads)


def assign(reader: Sharded, owner: Sharded) -> Assignment | None:
    """Returns which heads the reader takes from this owner and with which seat. None if it takes nothing there.

    Ranks that hold the same heads share their readers evenly. REQUIRES equal total_heads. Raises ConfigError as
    `heads_of` does.
    """
    readers = _readers(owner, reader.tp_size)
    if reader.tp_rank not in readers:
        return None
    ours = heads_of(reader.total_heads, reader.tp_rank, reader.tp_size)
    theirs = heads_of(owner.total_heads, owner.tp_rank, owner.tp_size)
    heads = (max(ours[0], theirs[0]), min(ours[1], theirs[1]))
    return Assignment(heads, reader.tp_rank - readers.start, len(readers))


def assign_groups(reader: Sequence[Sharded], owner: Sequence[Sharded]) -> GroupsAssignment | None:
    """Returns what `assign` does for all cache groups together, which have one seat for each reader.

    REQUIRES as many groups, with equal total_heads, at both ends. Raises ConfigError as `heads_of` does.
    """
    pairs = list(zip(reader, owner, strict=True))
    if len(pairs) == 1:
        alone = assign(*pairs[0])
        return None if alone is None else GroupsAssignment((alone.heads,), alone.seat, alone.num_seats)
    found = [assign(ours, theirs) for ours, theirs in pairs]
    readers = _readers_of_groups(owner, reader[0].tp_size)
    if reader[0].tp_rank not in readers:
        return None
    heads = tuple(None if each is None else each.heads for each in found)
    return GroupsAssignment(heads, readers.index(reader[0].tp_rank), len(readers))


def num_seats(owner: Sharded | Sequence[Sharded], reader_tp_size: int) -> int:
    """Returns how many readers of a tensor-parallel degree read from this owner. With 0 it need not offer.

    owner: its share, or that of each cache group.
    """
    groups = owner if isinstance(owner, Sequence) else (owner,)
    return len(_readers_of_groups(groups, reader_tp_size))


def _readers_of_groups(owner: Sequence[Sharded], reader_tp_size: int) -> list[int]:
    """Returns the reader ranks that read at least one group from this owner, in order."""
    return sorted({rank for group in owner for rank in _readers(group, reader_tp_size)})


def _readers(owner: Sharded, reader_tp_size: int) -> range:
    """Returns the reader ranks that read from this owner, its replica's part of those that need its heads."""
    heads_of(owner.total_heads, 0, reader_tp_size)
    first_head, end_head = heads_of(owner.total_heads, owner.tp_rank, owner.tp_size)
    first = first_head * reader_tp_size // owner.total_heads
    end = -(-end_head * reader_tp_size // owner.total_heads)
    replicas = num_replicas(owner)
    replica = owner.tp_rank % replicas

    def part(index: int) -> int:
        return first + -(-index * (end - first) // replicas)

    return range(part(replica), part(replica + 1))
