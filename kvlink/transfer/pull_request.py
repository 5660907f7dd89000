# SPDX-License-Identifier: Apache-2.0
"""Describes what a pull reads from one owner, as the core takes it."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvlink import _core
from kvlink.errors import ConfigError
from kvlink.layout import GroupsAssignment, KVLayout
from kvlink.ticket import SHARED_SEAT, LeaseSeat, Ticket
from kvlink.transfer.group_ids import TokenRanges, ranges_of, within
from kvlink.transfer.peer import Peer
from kvlink.types import ReadyUnit

STREAM_UNITS = {ReadyUnit.BLOCKS: 1, ReadyUnit.LAYERS: 2, ReadyUnit.TOKENS: 3}
"""The numbers of csrc/engine/pull_request.h; 0 stands for a pull that does not stream."""
_ALL_LAYERS = (0, 2**32 - 1)
_BLOCKS, _TOKENS = ReadyUnit.BLOCKS, ReadyUnit.TOKENS

_BATCHES = 64
"""A chain of n relays takes about 1 + n / 64 of the time of one pull. After each batch a pull waits for a check of the
slot of its owner, so more batches cost more of these waits."""
_LEAST_BATCH_BYTES = 256 << 10

Words = tuple[int, int, int]
"""The slot and the nonce of a seat, and the value that settles it; 0 does not settle."""


class PullSpec(NamedTuple):
    """The arguments of `Worker.pull` that say what is read. `into` is a copy, with one buffer for each cache group."""

    into: Any
    tokens: TokenRanges | None
    layers: tuple[int, int] | None
    settle: bool


class PullGroup(NamedTuple):
    """Describes the part of one cache group in a pull, as the core takes it: `_core.GroupRow`."""

    planner: _core.Planner
    block_ids: Any
    """The owner's blocks."""
    into: Any
    """The reader's blocks."""
    tokens: tuple[int, int]
    layers: tuple[int, int]
    at_end: bool
    """Whether a streaming pull reads the group once all is ready."""


class PullPart(NamedTuple):
    """Describes what a pull reads from one owner, as the core takes it: `_core.PartRow`."""

    connection: _core.Connection
    groups: list[PullGroup]
    lease: Words
    stream: int
    """A number of STREAM_UNITS, or 0."""
    num_tokens: int


def start(
    peer: Peer,
    ticket: Ticket,
    into: Any,
    tokens: Any,
    layers: tuple[int, int] | None,
    settle: bool,
    timeout_s: float,
) -> _core.Pull | None:
    """Starts reading from one owner. Returns None if its connection is broken. Raises ConfigError."""
    seats, planner = ticket.seats, peer.planner
    plain = settle and len(seats) == peer.num_seats == 1 and ticket.model == peer.model.number
    words = seats[0] if plain else lease_words(ticket, peer, settle)
    if planner is None or ticket.ready_unit is _TOKENS:
        groups = _groups(peer, ticket, into, tokens, layers)
        return peer.connection.pull_groups(
            groups, words, stream_of(peer, ticket), ticket.num_tokens, timeout_s
        )
    block_ids = ticket.block_ids
    return peer.connection.pull(
        planner,
        block_ids,
        into,
        (0, ticket.num_tokens) if tokens is None else within(tokens, ticket.num_tokens, "tokens", ticket),
        (0, peer.end_layer) if layers is None else layers_read(layers, peer, ticket),
        words,
        0 if ticket.ready_unit is _BLOCKS and ticket.ready >= len(block_ids) else stream_of(peer, ticket),
        timeout_s,
    )


def part_of(peer: Peer, ticket: Ticket, want: PullSpec) -> PullPart:
    """Returns the part of a pull that is read from one owner. Raises ConfigError."""
    groups = _groups(peer, ticket, want.into, want.tokens, want.layers)
    lease = lease_words(ticket, peer, want.settle)
    return PullPart(peer.connection, groups, lease, stream_of(peer, ticket), ticket.num_tokens)


def stream_of(peer: Peer, ticket: Ticket) -> int:
    """Returns in which units of STREAM_UNITS the pull follows its owner, or 0 if all is written."""
    unit = ticket.ready_unit
    units = (
        len(ticket.block_ids)
        if unit is _BLOCKS
        else ticket.num_tokens
        if unit is _TOKENS
        else peer.num_layers
    )
    return 0 if ticket.ready >= units else STREAM_UNITS[unit]


def _groups(
    peer: Peer, ticket: Ticket, into: Any, tokens: Any, layers: tuple[int, int] | None
) -> list[PullGroup]:
    layouts, theirs, kept = peer.card.layouts, ticket.groups(), ticket.tokens_of_groups()
    ours = [into] if len(layouts) == 1 else into
    what = f"request {ticket.request_id}"
    if len(theirs) != len(layouts):
        raise ConfigError(f"{what}: the ticket has {len(theirs)} cache groups, its worker {len(layouts)}")
    if tokens is not None and len(layouts) == 1:
        tokens = within(tokens, ticket.num_tokens, "tokens", ticket)
    if layers is not None and len(layouts) > 1:
        raise ConfigError(f"{what}: `layers` selects layers of one cache group, and there are {len(layouts)}")
    if layers is not None:
        layers = layers_read(layers, peer, ticket)
    elif peer.planner is not None:
        layers = (0, peer.end_layer)
    ranges = ranges_of(tokens, layouts, ticket, theirs)
    groups = []
    for index, (planner, layout) in enumerate(zip(peer.planners, layouts, strict=True)):
        if planner is None:
            continue
        if layout.is_state and len(theirs[index]) != len(ours[index]):
            raise ConfigError(
                f"{what}: cache group {index} has {len(theirs[index])} states there, and {len(ours[index])} here"
            )
        # How far a group with fewer tokens is written, the count of the request's tokens does not say.
        at_end = layout.is_state or kept[index] < ticket.num_tokens
        groups.append(
            PullGroup(planner, theirs[index], ours[index], ranges[index], layers or _ALL_LAYERS, at_end)
        )
    return [group for group in groups if group.tokens[0] < group.tokens[1]] or [
        groups[0]._replace(tokens=(0, 0))
    ]


def layers_read(layers: tuple[int, int], peer: Peer, ticket: Ticket) -> tuple[int, int]:
    """Returns those of the layers that both ends have. Raises ConfigError for layers that the model does not have."""
    first, end = within(layers, peer.total_layers, "layers", ticket)
    return min(first, peer.end_layer), min(end, peer.end_layer)


def lease_words(ticket: Ticket, peer: Peer, settle: bool) -> Words:
    """Returns the words of this rank's seat. Every read takes them first.

    Raises ConfigError without a seat, and LayoutMismatch for the cache of another model.
    """
    if ticket.model != peer.model.number and peer.model.number:
        raise peer.model.refuse(ticket.model, ticket.worker_id, peer.card.layouts[0].model)
    return _words(ticket, peer, settle)


def _words(ticket: Ticket, reader: Peer | GroupsAssignment, settle: bool) -> Words:
    """Returns the words of a seat. A soft ticket has one for all ranks, see SHARED_SEAT in csrc/lease/lease_words.h."""
    seats = ticket.seats
    if seats[0].settle_nonce == SHARED_SEAT:
        return seats[0].slot, seats[0].nonce, SHARED_SEAT
    try:
        seat = seats[reader.seat]
    except IndexError:
        raise ConfigError(
            f"request {ticket.request_id}: this rank reads with seat {reader.seat} and the ticket has "
            f"{len(ticket.seats)}; offer it with readers={reader.num_seats}"
        ) from None
    return seat.slot, seat.nonce, _settled_value(ticket, seat, reader.num_seats) if settle else 0


def settle_args(ticket: Ticket, assignment: GroupsAssignment) -> tuple[int, int]:
    """Returns the slot of this rank, and the value that settles it. Raises ConfigError if there is no such seat."""
    slot, _, value = _words(ticket, assignment, True)
    return slot, value


def _settled_value(ticket: Ticket, seat: LeaseSeat, num_readers: int) -> int:
    """Returns the value that settles a seat, and with it the seats that the ticket has beyond its readers."""
    return seat.settle_nonce if len(ticket.seats) == num_readers else seat.settle_nonce ^ num_readers


def check_relay(peer: Peer | None, ticket: Ticket) -> Peer:
    """Returns the peer. Raises ConfigError unless what is read from it under the ticket can be offered on."""
    if peer is None or not peer.is_alone or peer.planner is None or peer.card.layouts[0].context.size > 1:
        raise ConfigError(
            f"request {ticket.request_id}: a relay reads one cache group from one owner; use `pull`, and offer when it "
            "has ended"
        )
    return peer


def tokens_per_unit(peer: Peer, ticket: Ticket) -> int:
    """Returns the number of tokens in a unit of the ticket."""
    return peer.card.layouts[0].block_tokens if ticket.ready_unit is ReadyUnit.BLOCKS else 1


def batch_units(own: KVLayout, scale: int, num_tokens: int, num_bytes: int | None) -> int:
    """Returns how many units of `scale` tokens have `num_bytes` bytes here. None chooses by the size of the request."""
    token_bytes = len(own.planes) * own.num_heads * own.row_bytes
    if num_bytes is None:
        num_bytes = max(num_tokens * token_bytes // _BATCHES, _LEAST_BATCH_BYTES)
    return max(num_bytes // (token_bytes * scale), 1)
