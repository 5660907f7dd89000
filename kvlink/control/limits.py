# SPDX-License-Identifier: Apache-2.0
"""How much anyone may ask of the control plane. Wire bounds are constants, capacity is configurable."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.ticket import MAX_NAME_BYTES, MAX_TICKET_BYTES

__all__ = ["MAX_NAME_BYTES", "MAX_TICKET_BYTES"]

MAX_TTL_S = 86_400.0
MAX_TIMEOUT_S = 3_600.0
MAX_CLAIM_ID_BYTES = 64
MAX_TP_SIZE = 1_024
MAX_SEATS = 255
MAX_BATCH_OPS = 1_024
"""Keeps one batch from holding the coordinator's only thread for more than a few milliseconds."""
MAX_BATCH_BYTES = 2 << 20
"""Of a batch with several operations; one that is larger goes alone."""
MAX_LISTED = 1 << 18
"""Cards, changes or results in one reply."""
MAX_METHODS = 4_096
"""Rows of an overview about a coordinator's own calls."""
MAX_WATCHED = 1_024
"""Workers that one watch names."""
MAX_CONNECTIONS = 20_000
"""To one server: twice the workers of a coordinator."""
HANDSHAKE_MS = 10_000
"""What a new connection gets to say who it is."""
MAX_CONNECTS = 1_024
"""Readers that one worker admits at one time; they wait for a few threads."""
MAX_CONNECTS_OF_ONE = 512
"""Of these, readers that one process asks for, or another host."""
MAX_HELLOS = 64
MAX_OPAQUE_BYTES = 64 << 10
"""A hello, reply, address or key."""
MAX_PLANES = 16_384
MAX_REGIONS = 4_096
MAX_TRANSPORTS = 32
MAX_LEASE_KEYS = 2
MAX_CONNECTION_ID = (1 << 31) - 1
MAX_CARD_BYTES = 4 << 20
MAX_REQUEST_BYTES = 8 << 20
"""The largest message a server takes: one ticket of a million blocks fits."""
MAX_REPLY_BYTES = 256 << 20
"""The largest message a client takes: the tickets of all ranks, or the cards of a large fleet."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one coordinator holds at most. Beyond it calls get RESOURCE_EXHAUSTED."""

    workers: int = 10_000
    tickets_per_worker: int = 65_536
    """Offered and neither fully claimed nor expired."""
    ticket_bytes: int = 1 << 30
    """Of all tickets that are offered; one of 64k tokens has 16 KiB."""
    waiting_claims: int = 65_536
    pending_settles: int = 4_096
    """Settle orders kept for a worker whose keep-alive stream is down."""
    remembered_epochs: int = 65_536
    """Workers that left or died, so that the next process of the name gets a higher epoch."""
    remembered_requests: int = 16_384
    """Requests that ended: claims sent again get the same tickets, or at once the reason why there are none."""
