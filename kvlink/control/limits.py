# SPDX-License-Identifier: Apache-2.0
"""Bounds what a peer may ask of the control plane. Wire bounds are constants; capacity is configurable."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.layout.groups import MAX_GROUPS
from kvlink.layout.split import MAX_RANKS
from kvlink.runtime.names import MAX_NAME_BYTES
from kvlink.ticket import MAX_TICKET_BYTES

__all__ = ["MAX_NAME_BYTES", "MAX_RANKS", "MAX_TICKET_BYTES"]

MAX_TTL_S = 86_400.0
MAX_TIMEOUT_S = 3_600.0
MAX_CLAIM_ID_BYTES = 64
MAX_SEATS = 255
MAX_BATCH_OPS = 1_024
"""Decoding so many takes a few milliseconds. They are executed a few at a time."""
MAX_BATCH_BYTES = 2 << 20
"""Bounds a batch with several operations. An operation that is larger is sent alone."""
MAX_LISTED = 1 << 18
"""Bounds the cards, changes or results in one reply."""
MAX_METHODS = 4_096
"""Bounds the rows of an overview about a coordinator's own calls."""
MAX_WATCHED = 1_024
"""Bounds the workers that one watch names."""
MAX_CONNECTIONS = 20_000
"""Bounds the connections to one server: twice the number of workers of a coordinator."""
HANDSHAKE_MS = 10_000
"""A new connection must finish its handshake within this time."""
MAX_CONNECTS = 1_024
"""One worker admits this many readers at a time. They wait for a few threads."""
MAX_CONNECTS_OF_ONE = 512
"""One process of this host, or one other host, may ask for this many of them."""
MAX_HELLOS = 64
MAX_OPAQUE_BYTES = 64 << 10
"""Bounds a hello, reply, address or key."""
MAX_LAYOUTS = MAX_GROUPS
MAX_PLANES = 2_048
"""Bounds the planes of all layouts of a card together."""
MAX_REGIONS = 4_096
MAX_TRANSPORTS = 32
MAX_LEASE_KEYS = 2
MAX_CHANNEL_ADDRESSES = 4
MAX_CONNECTION_ID = (1 << 31) - 1
MAX_POOL_KEYS = 4_096
"""Bounds the pool keys of all transports of a card together."""
MAX_CARD_BYTES = 4 << 20
MAX_PREFIXES = 256
"""Bounds the prefixes that one call publishes."""
MAX_PREFIX_KEYS = 1 << 16
"""Bounds the keys of a prefix, and those of all prefixes that one call publishes."""
MAX_PREFIX_TICKET_BYTES = 4 << 20
MAX_FOUND = 16
"""Bounds the servers that the answer to one lookup names."""
MAX_ASKED_LAST = 64
"""Bounds the workers that a lookup asks for last."""
MAX_REQUEST_BYTES = 8 << 20
"""The largest message that a server accepts. One ticket of a million blocks fits."""
MAX_REPLY_BYTES = 256 << 20
"""The largest message that a client accepts: the tickets of all ranks, or the cards of a large fleet."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds what one coordinator holds. Calls beyond a bound are refused with RESOURCE_EXHAUSTED."""

    workers: int = 10_000
    card_bytes: int = 1 << 30
    """Bounds what the cards of all workers take here. One with 160 planes takes 60 KiB."""
    tickets: int = 1 << 19
    """Bounds the tickets of all workers, each of which takes 1 KiB beside its bytes."""
    tickets_per_worker: int = 65_536
    """Counts tickets that are offered and neither fully claimed nor expired."""
    ticket_bytes: int = 1 << 30
    """Bounds the bytes of all offered tickets. A ticket for 64k tokens has 16 KiB."""
    waiting_claims: int = 65_536
    pending_settles: int = 4_096
    """Counts the settle orders kept for a worker whose keep-alive stream is down."""
    remembered_epochs: int = 65_536
    """Counts remembered workers that left or died, so that the next process of the name gets a higher epoch."""
    prefixes: int = 65_536
    """Counts the prefixes in the directory, of all tenants. The oldest is forgotten for a further one."""
    prefix_bytes: int = 256 << 20
    """Bounds the memory of the directory. A prefix of 64k tokens, in blocks of 16, takes 36 KiB and its tickets."""
    remembered_requests: int = 16_384
    """Counts remembered requests that ended. A repeated claim gets the same tickets, or at once the reason for none."""
