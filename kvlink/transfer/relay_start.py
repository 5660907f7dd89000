# SPDX-License-Identifier: Apache-2.0
"""Starts the pull of a relay: it reads in batches, and each batch that has validated is announced to readers."""

from __future__ import annotations

from typing import Any

from kvlink.errors import ConfigError, PeerUnreachable
from kvlink.layout import KVLayout
from kvlink.ticket import Ticket
from kvlink.transfer.engine import Engine, Transfer
from kvlink.transfer.group_start import STREAM_UNITS
from kvlink.transfer.peer import Peer
from kvlink.transfer.pull_start import lease_words
from kvlink.types import ReadyUnit

_BATCHES = 64
"""A chain of n relays takes about 1 + n / 64 of the time of one pull. After each batch a pull waits for a look at the
slot of its owner, so more batches cost more of these waits."""
_LEAST_BATCH_BYTES = 256 << 10


def check_relay(peer: Peer | None, ticket: Ticket) -> Peer:
    """Returns the peer. Raises ConfigError unless what is read from it under the ticket can be offered on."""
    what = f"request {ticket.request_id}: a relay"
    if peer is None or not peer.is_alone or peer.planner is None or peer.card.layouts[0].context.size > 1:
        raise ConfigError(
            f"{what} reads one cache group from one owner; use `pull`, and offer when it has ended"
        )
    if ticket.ready_unit is ReadyUnit.LAYERS:
        raise ConfigError(f"{what} follows blocks or tokens, and this offer counts layers")
    return peer


def scale_of(peer: Peer, ticket: Ticket) -> int:
    """Returns the number of tokens in a unit of the ticket."""
    return peer.card.layouts[0].block_tokens if ticket.ready_unit is ReadyUnit.BLOCKS else 1


def batch_units(own: KVLayout, scale: int, num_tokens: int, num_bytes: int | None) -> int:
    """Returns how many units of `scale` tokens have `num_bytes` bytes here. None chooses by the size of the request."""
    token_bytes = len(own.planes) * own.num_heads * own.row_bytes
    if num_bytes is None:
        num_bytes = max(num_tokens * token_bytes // _BATCHES, _LEAST_BATCH_BYTES)
    return max(num_bytes // (token_bytes * scale), 1)


def start_relay(
    engine: Engine,
    peer: Peer,
    ticket: Ticket,
    into: Any,
    first_token: int,
    lease: int,
    last: bool,
    batch_bytes: int | None,
    timeout_s: float,
) -> Transfer:
    """Starts reading from `first_token` on, and announces what has validated under `lease` of this worker, in tokens.

    The tokens before are valid already. With lease 0 nothing is announced. With `last`, the lease ends if the pull
    fails. Raises PeerUnreachable, ConfigError.
    """
    scale = scale_of(peer, ticket)
    assert peer.planner is not None
    transfer = peer.connection.relay(
        engine.core,
        lease,
        scale,
        last,
        (peer.planner, ticket.block_ids, into, (first_token, ticket.num_tokens), (0, peer.end_layer), False),
        lease_words(ticket, peer, True),
        STREAM_UNITS[ticket.ready_unit],
        ticket.num_tokens,
        batch_units(engine.pool.layout, scale, ticket.num_tokens, batch_bytes),
        timeout_s,
    )
    if transfer is None:
        raise PeerUnreachable(f"{ticket.worker_id} closed the connection: {peer.connection.why_broken()}")
    return transfer
