# SPDX-License-Identifier: Apache-2.0
"""Starts reads of several cache groups from one owner as one transfer, which validates and settles once."""

from __future__ import annotations

from typing import Any

from kvlink.errors import ConfigError
from kvlink.ticket import Ticket
from kvlink.transfer.engine import Transfer
from kvlink.transfer.group_ids import TokenRanges, ranges_of, within
from kvlink.transfer.peer import Peer
from kvlink.types import ReadyUnit

STREAM_UNITS = {ReadyUnit.BLOCKS: 1, ReadyUnit.LAYERS: 2, ReadyUnit.TOKENS: 3}
"""The numbers of csrc/engine/pull_request.h; 0 stands for a pull that does not stream."""
_ALL_LAYERS = (0, 2**32 - 1)


def start_groups(
    peer: Peer,
    ticket: Ticket,
    into: Any,
    tokens: TokenRanges | None,
    layers: tuple[int, int] | None,
    seat: tuple[int, int, int],
    timeout_s: float,
) -> Transfer | None:
    """Starts reading from one owner. Returns None if its connection is broken. Raises ConfigError.

    into: a buffer of block ids, or with several groups one for each. `seat`: slot, nonce, and value to settle or 0.
    """
    layouts, theirs, kept = peer.card.layouts, ticket.groups(), ticket.tokens_of_groups()
    ours = [into] if len(layouts) == 1 else into
    what = f"request {ticket.request_id}"
    if len(theirs) != len(layouts):
        raise ConfigError(f"{what}: the ticket has {len(theirs)} cache groups, its worker {len(layouts)}")
    if layers is not None:
        if len(layouts) > 1:
            raise ConfigError(
                f"{what}: `layers` selects layers of one cache group, and there are {len(layouts)}"
            )
        layers = layers_read(layers, peer, ticket)
    ranges = ranges_of(tokens, layouts, ticket, theirs)
    reads = []
    for index, (planner, layout) in enumerate(zip(peer.planners, layouts, strict=True)):
        if planner is None:
            continue
        if layout.is_state and len(theirs[index]) != len(ours[index]):
            raise ConfigError(
                f"{what}: cache group {index} has {len(theirs[index])} states there, and {len(ours[index])} here"
            )
        # How far a group with fewer tokens is written, the count of the request's tokens does not say.
        at_end = layout.is_state or kept[index] < ticket.num_tokens
        reads.append((planner, theirs[index], ours[index], ranges[index], layers or _ALL_LAYERS, at_end))
    reads = [read for read in reads if read[3][0] < read[3][1]] or [(*reads[0][:3], (0, 0), *reads[0][4:])]
    units = ticket.num_tokens if ticket.ready_unit is ReadyUnit.TOKENS else len(ticket.block_ids)
    stream = 0 if ticket.ready >= units else STREAM_UNITS[ticket.ready_unit]
    return peer.connection.pull_groups(reads, seat, stream, ticket.num_tokens, timeout_s)


def layers_read(layers: tuple[int, int], peer: Peer, ticket: Ticket) -> tuple[int, int]:
    """Returns those of the layers that both ends have. Raises ConfigError for layers that the model does not have."""
    first, end = within(layers, peer.total_layers, "layers", ticket)
    return min(first, peer.end_layer), min(end, peer.end_layer)
