# SPDX-License-Identifier: Apache-2.0
"""Connects to the owners of a pull."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvlink import tracing
from kvlink.errors import ConfigError, TransferError
from kvlink.ticket import Ticket
from kvlink.tracing import Kind
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers

Owner = tuple[Ticket, Peer]


async def connect_one(peers: Peers, ticket: Ticket, deadline: float) -> Peer | None:
    """Connects to one owner. Other pulls may wait for the same attempt, so the error names the request of this one."""
    try:
        return await peers.connect(ticket.worker_id, ticket.epoch, ticket.agent, deadline)
    except TransferError as error:
        raise type(error)(f"request {ticket.request_id}: {error}") from error


async def connect_all(
    peers: Peers, tickets: Sequence[Ticket], deadline: float, *, complete: bool = False
) -> list[Owner]:
    """Connects to the owners concurrently, and leaves out those with nothing for this rank.

    `deadline` is by `time.monotonic()`. Raises KVLinkError, and with `complete` also ConfigError unless all owners of
    this rank's part are there.
    """
    about = {"kvlink.request_id": tickets[0].request_id}
    with tracing.span("kvlink.connect", Kind.CLIENT, tickets[0].trace, about):
        found = await asyncio.gather(*(connect_one(peers, ticket, deadline) for ticket in tickets))
    connected = [(ticket, peer) for ticket, peer in zip(tickets, found, strict=True) if peer is not None]
    if not connected:
        raise ConfigError(f"request {tickets[0].request_id}: none of its tickets has a part for this rank")
    if complete:
        _check_complete(connected, tickets[0].request_id)
    return connected


def _check_complete(connected: Sequence[Owner], request_id: str) -> None:
    """Raises ConfigError unless the tickets are those of all owners from which this rank takes a part."""
    if len({(ticket.request_id, ticket.num_tokens) for ticket, _ in connected}) > 1:
        names = sorted({f"{ticket.request_id} of {ticket.num_tokens} tokens" for ticket, _ in connected})
        raise ConfigError(f"the tickets of a pull must be of one request, and not of {', '.join(names)}")
    given = sorted(peer.rank for _, peer in connected)
    for _, peer in connected:
        if given != sorted(peer.sources):
            raise ConfigError(
                f"request {request_id}: this rank takes its part from ranks {_listed(peer.sources)} of the server of "
                f"{peer.card.worker_id}, and the tickets are of ranks {_listed(given)}; pass one ticket of each"
            )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
