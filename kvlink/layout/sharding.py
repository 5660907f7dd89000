# SPDX-License-Identifier: Apache-2.0
"""Computes what a rank holds of a cache, and from which ranks a reader takes its own part. Pure functions only.

The ranks of a server are counted by stage of the pipeline, then by prefill context parallel rank, then by tensor
parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from kvlink.errors import ConfigError
from kvlink.layout.split import ALL_LAYERS, ALL_TOKENS, Context, Pipeline


class TensorParallel(Protocol):
    """The heads that one rank holds."""

    @property
    def total_heads(self) -> int:
        """KV heads of the whole model, 1 for MLA."""

    @property
    def tp_rank(self) -> int:
        """Tensor-parallel rank, counted from 0."""

    @property
    def tp_size(self) -> int:
        """Tensor-parallel degree."""


class Sharded(TensorParallel, Protocol):
    """The share of a model that one rank holds. KVLayout, Geometry and Share implement it."""

    @property
    def pipeline(self) -> Pipeline:
        """The stage that has the layers of the rank."""

    @property
    def context(self) -> Context:
        """The tokens that the rank holds."""


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a model that one rank holds, without its place in memory."""

    total_heads: int
    """KV heads of the whole model, 1 for MLA."""
    tp_rank: int = 0
    tp_size: int = 1
    pipeline: Pipeline = ALL_LAYERS
    context: Context = ALL_TOKENS


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


def num_replicas(share: TensorParallel) -> int:
    """Returns how many ranks hold the same heads as this one, itself included. Their numbers are consecutive."""
    return max(1, share.tp_size // share.total_heads)


def rank_of(share: Sharded) -> tuple[int, int]:
    """Returns the rank among all ranks of its server, and their number."""
    parts = share.context.num_parts
    part = share.context.rank // share.context.tp_ranks
    rank = (share.pipeline.rank * parts + part) * share.tp_size + share.tp_rank
    return rank, share.pipeline.size * parts * share.tp_size


def check_share(share: Sharded) -> None:
    """Raises ConfigError if the ranks that share tokens do not hold the same heads."""
    context = share.context
    if num_replicas(share) % context.tp_ranks or (context.rank - share.tp_rank) % context.tp_ranks:
        raise ConfigError(
            f"context: {context.tp_ranks} tensor-parallel ranks, among them rank {share.tp_rank} of {share.tp_size} as "
            f"rank {context.rank}, cannot share tokens, because {num_replicas(share)} rank(s) hold the same heads"
        )


def assign(reader: Sharded, owner: Sharded) -> Assignment | None:
    """Returns which heads the reader takes from this owner and with which seat. None if it takes nothing there.

    Of the layers and the tokens it takes those that both have. Ranks that hold the same share their readers evenly.
    REQUIRES equal total_heads. Raises ConfigError as `heads_of` does.
    """
    if not _reads(reader, owner):
        return None
    ours = heads_of(reader.total_heads, reader.tp_rank, reader.tp_size)
    theirs = heads_of(owner.total_heads, owner.tp_rank, owner.tp_size)
    readers = _readers(_split(owner), _split(reader))
    heads = (max(ours[0], theirs[0]), min(ours[1], theirs[1]))
    return Assignment(heads, readers.index(rank_of(reader)[0]), len(readers))


def assign_groups(reader: Sequence[Sharded], owner: Sequence[Sharded]) -> GroupsAssignment | None:
    """Returns what `assign` does for all cache groups together, which have one seat for each reader.

    REQUIRES as many groups, with equal total_heads, at both ends. Raises ConfigError as `heads_of` does.
    """
    found = [assign(ours, theirs) for ours, theirs in zip(reader, owner, strict=True)]
    if not any(found):
        return None
    heads = tuple(None if each is None else each.heads for each in found)
    readers = _readers_of_groups(owner, reader)
    return GroupsAssignment(heads, readers.index(rank_of(reader[0])[0]), len(readers))


def num_seats(owner: Sharded | Sequence[Sharded], readers: int | Sharded | Sequence[Sharded]) -> int:
    """Returns how many readers read from this owner. With 0 it need not offer.

    owner: its share, or that of each cache group.
    readers: their tensor-parallel degree, or the share of one of them, or that of each cache group.
    """
    groups = owner if isinstance(owner, Sequence) else (owner,)
    if isinstance(readers, int):
        readers = [Share(group.total_heads, 0, readers) for group in groups]
    elif not isinstance(readers, Sequence):
        readers = (readers,)
    return len(_readers_of_groups(groups, readers))


def owner_ranks(reader: Sequence[Sharded], owner: Sequence[Sharded]) -> frozenset[int]:
    """Returns the ranks of the owner's server from which the reader takes something, given one of these ranks."""
    pairs = {(_split(ours), _split(theirs)) for ours, theirs in zip(reader, owner, strict=True)}
    return frozenset(
        rank for ours, theirs in pairs for rank, other in enumerate(_all_ranks(theirs)) if _reads(ours, other)
    )


def _split(share: Sharded) -> Share:
    return Share(share.total_heads, share.tp_rank, share.tp_size, share.pipeline, share.context)


def _all_ranks(share: Sharded) -> list[Share]:
    """Returns the shares of all ranks of the server, in order."""
    return [
        Share(
            share.total_heads,
            tp_rank,
            share.tp_size,
            Pipeline(stage, share.pipeline.bounds),
            share.context.at(part, tp_rank),
        )
        for stage in range(share.pipeline.size)
        for part in range(share.context.num_parts)
        for tp_rank in range(share.tp_size)
    ]


def _readers_of_groups(owner: Sequence[Sharded], reader: Sequence[Sharded]) -> list[int]:
    """Returns the ranks of the reader's server that read at least one group from this owner, in order."""
    pairs = {(_split(theirs), _split(ours)) for theirs, ours in zip(owner, reader, strict=True)}
    return sorted({rank for theirs, ours in pairs for rank in _readers(theirs, ours)})


@lru_cache(maxsize=4096)
def _readers(owner: Share, reader: Share) -> tuple[int, ...]:
    """Returns the ranks of the reader's server that read from this owner, in order."""
    return tuple(rank for rank, other in enumerate(_all_ranks(reader)) if _reads(other, owner))


def _reads(reader: Sharded, owner: Sharded) -> bool:
    """Returns whether a rank takes something from an owner."""
    return (
        reader.tp_rank in _tp_readers(owner, reader.tp_size)
        and reader.pipeline.meets(owner.pipeline)
        and reader.context.meets(owner.context)
    )


def _tp_readers(owner: Sharded, reader_tp_size: int) -> range:
    """Returns the tensor-parallel ranks that read from this owner: its copy's part of those that need its heads."""
    heads_of(owner.total_heads, 0, reader_tp_size)
    first_head, end_head = heads_of(owner.total_heads, owner.tp_rank, owner.tp_size)
    first = first_head * reader_tp_size // owner.total_heads
    end = -(-end_head * reader_tp_size // owner.total_heads)
    copies = num_replicas(owner) // owner.context.tp_ranks
    copy = owner.tp_rank % num_replicas(owner) // owner.context.tp_ranks

    def part(index: int) -> int:
        return first + -(-index * (end - first) // copies)

    return range(part(copy), part(copy + 1))
