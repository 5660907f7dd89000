# SPDX-License-Identifier: Apache-2.0
"""Defines requests and replies of the control plane. They are named tuples because each handoff creates several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from kvlink.types import WorkerCard, WorkerChange


class JoinRequest(NamedTuple):
    """Asks to join. `card.epoch` is a proposal; with `rejoin` it is an epoch that this process already held."""

    card: WorkerCard
    rejoin: bool = False


class Membership(NamedTuple):
    """Tells a worker its granted epoch. A worker that does not beat for `lease_s` seconds counts as gone."""

    epoch: int
    lease_s: float
    keep_alive_s: float


class Incarnation(NamedTuple):
    """Records the last known process of a worker_id."""

    epoch: int
    incarnation: bytes
    left: bool = False
    """The process left on its own, rather than losing its lease."""


class WorkerEpoch(NamedTuple):
    """Names one epoch of a worker. Epoch 0 means the running one."""

    worker_id: str
    epoch: int


class Offer(NamedTuple):
    """Publishes one rank's ticket of a request. `ticket` is secret and opaque to the control plane."""

    request_id: str
    worker_id: str
    epoch: int
    ttl_s: float
    rank: int
    num_ranks: int
    num_seats: int
    ticket: bytes

    def __repr__(self) -> str:
        """Omits the ticket, which is secret."""
        return (
            f"Offer({self.request_id!r} by {self.worker_id!r} epoch {self.epoch}, {len(self.ticket)} bytes)"
        )


class Claim(NamedTuple):
    """Asks for all tickets of a request on behalf of one of `num_readers` readers.

    A claim repeated under the same non-empty `claim_id` gets the same tickets.
    """

    request_id: str
    timeout_s: float = 0.0
    reader: int = 0
    num_readers: int = 1
    claim_id: bytes = b""

    def __repr__(self) -> str:
        """Omits the claim id, because whoever knows it gets the tickets again."""
        return (
            f"Claim({self.request_id!r} for reader {self.reader} of {self.num_readers}, {self.timeout_s:g} s)"
        )


class Claimed(NamedTuple):
    """Records which readers got the tickets of a request. Coordinators share it through their store."""

    tickets: tuple[bytes, ...]
    """Digests of the tickets that the record is about, in rank order."""
    readers: tuple[tuple[int, bytes], ...]
    """(reader, claim id) of each reader that has claimed."""
    complete: bool
    """True when all readers have claimed."""
    ttl_s: float
    """The record is kept this long, because any of its tickets may be offered again until then."""


class SettleOrder(NamedTuple):
    """Asks an owner to end one seat of a lease because the reader cannot write into the slot itself."""

    worker_id: str
    epoch: int
    slot: int
    settle_nonce: int

    def __repr__(self) -> str:
        """Omits the nonce, which is secret."""
        return f"SettleOrder({self.worker_id!r} epoch {self.epoch}, slot {self.slot})"


class Renewal(NamedTuple):
    """Asks an owner to extend leases. `seats` holds (slot, settle nonce) of seats whose readers still wait."""

    worker_id: str
    epoch: int
    seats: list[tuple[int, int]]

    def __repr__(self) -> str:
        """Omits the nonces, which are secret."""
        return f"Renewal({self.worker_id!r} epoch {self.epoch}, {len(self.seats)} seats)"


class PushKind(Enum):
    """Says what a Push on the keep-alive stream means to the worker."""

    ACK = 0
    REJOIN = 1
    SETTLE = 2


class Push(NamedTuple):
    """Carries a message from the coordinator to a worker. `slot` and `settle_nonce` are set for SETTLE only."""

    kind: PushKind
    slot: int = 0
    settle_nonce: int = 0

    def __repr__(self) -> str:
        """Omits the nonce, which is secret."""
        return f"Push({self.kind.name}, slot {self.slot})"


class HandoffBatch(NamedTuple):
    """Carries operations of a handoff stream. They are executed in the order of the fields."""

    offers: list[Offer]
    settles: list[SettleOrder]
    claims: list[Claim]
    withdrawn: Sequence[int] = ()
    """Numbers of the stream's claims that the client no longer waits for."""


class HandoffKind(Enum):
    """Distinguishes operations of a handoff stream. Each kind is numbered separately."""

    OFFER = 0
    SETTLE = 1
    CLAIM = 2


class RefusedHandoff(NamedTuple):
    """Says that operation `number` of its kind failed. `reason` names a `refusal.Reason`."""

    kind: HandoffKind
    number: int
    reason: str
    sentence: str


class HandoffResults(NamedTuple):
    """Answers operations of a handoff stream.

    `offers_done` and `settles_done` count from the start of the stream. `claimed` pairs claim numbers and tickets.
    """

    offers_done: int
    settles_done: int
    claimed: list[tuple[int, list[bytes]]]
    refused: list[RefusedHandoff]

    def __repr__(self) -> str:
        """Omits the tickets, which are secret."""
        done = f"{self.offers_done} offers and {self.settles_done} settles done"
        return f"HandoffResults({done}, {len(self.claimed)} claimed, {len(self.refused)} refused)"


class ConnectRequest(NamedTuple):
    """Asks an owner to accept a connection. `hellos` has one entry per lane, for the owner's transport."""

    worker_id: str
    epoch: int
    transport: str
    hellos: Sequence[bytes]
    takes_keys: bool = False

    def __repr__(self) -> str:
        """Omits the hellos, which are secret."""
        lanes = len(self.hellos)
        return f"ConnectRequest({self.worker_id!r} epoch {self.epoch} over {self.transport}, {lanes} lanes)"


class ConnectReply(NamedTuple):
    """Carries the owner's replies in the order of the hellos. Keys are set only if they differ from the card's."""

    connection_id: int
    replies: Sequence[bytes]
    pool_keys: Sequence[bytes] = ()
    lease_keys: Sequence[bytes] = ()

    def __repr__(self) -> str:
        """Omits the replies and the keys, which are secret."""
        return f"ConnectReply(connection {self.connection_id}, {len(self.replies)} lanes)"


class CoordinatorStatus(NamedTuple):
    """Counts since the start of the coordinator.

    `workers`, `draining` (of these), `tickets`, `waiting_claims`, `prefixes` and `prefix_bytes` are current values.
    """

    uptime_s: float = 0.0
    workers: int = 0
    tickets: int = 0
    waiting_claims: int = 0
    joined: int = 0
    lost_workers: int = 0
    offered: int = 0
    claimed: int = 0
    expired: int = 0
    settle_orders: int = 0
    draining: int = 0
    prefixes: int = 0
    prefix_bytes: int = 0
    published_prefixes: int = 0
    evicted_prefixes: int = 0
    expired_prefixes: int = 0
    prefix_lookups: int = 0
    prefix_hits: int = 0


class StoreHealth(NamedTuple):
    """Says what a coordinator's store cannot do at the moment."""

    is_full: bool = False
    """The store refuses new tickets, claims and joins."""
    is_lost: bool = False
    """The coordinator's copy of the store is too old to serve claims and watches."""
    stale_s: float = 0.0
    """Seconds since the coordinator's copy was last known to be up to date, or 0 if it is up to date."""

    @property
    def is_healthy(self) -> bool:
        """Returns whether the store is neither full nor lost."""
        return not self.is_full and not self.is_lost

    @classmethod
    def worst(cls, of: Iterable[StoreHealth]) -> StoreHealth:
        """Combines the health of several stores: each field is the worst of them."""
        return cls._make(map(max, zip(cls(), *of, strict=True)))


class Nothing(NamedTuple):
    """Stands for an empty request or reply."""


WorkerChanges = list[WorkerChange]


class Watch(NamedTuple):
    """Asks for changes of these workers, or of all workers if the set is empty."""

    worker_ids: frozenset[str] = frozenset()

    def sees(self, changes: WorkerChanges) -> WorkerChanges:
        """Returns the changes that this watch asks for."""
        wanted = self.worker_ids
        return [change for change in changes if change.card.worker_id in wanted] if wanted else changes


KEY_BYTES = 8
SCOPE_BYTES = 16


class Prefix(NamedTuple):
    """Publishes one rank's soft ticket of a prefix. `ticket` is secret and opaque to the control plane."""

    request_id: str
    ttl_s: float
    rank: int
    num_ranks: int
    scope: bytes
    tokens_per_key: int
    keys: bytes
    ticket: bytes

    def __repr__(self) -> str:
        """Omits the ticket, which is secret."""
        return f"Prefix({self.request_id!r}, rank {self.rank} of {self.num_ranks}, {len(self.ticket)} bytes)"


class PrefixChanges(NamedTuple):
    """Tells a coordinator which prefixes a worker has, and the request ids of those that have ended."""

    worker_id: str
    epoch: int
    prefixes: tuple[Prefix, ...] = ()
    withdrawn: tuple[str, ...] = ()


class PrefixQuery(NamedTuple):
    """Asks for the longest prefix that other workers have. A match of `more_than` keys or fewer is of no use."""

    scope: bytes
    tokens_per_key: int
    keys: bytes
    more_than: int = 0
    most: int = 1
    worker_id: str = ""
    last: tuple[str, ...] = ()
    """Workers whose prefixes are named only if no other worker has any."""


class FoundPrefix(NamedTuple):
    """Names a server that has the first `num_keys` of the keys. `tickets` has one for each of its ranks."""

    num_keys: int
    tickets: tuple[bytes, ...]
    worker_ids: tuple[str, ...] = ()
    """The workers that published the tickets, or none if the coordinator does not name them."""

    def __repr__(self) -> str:
        """Omits the tickets, which are secret."""
        return f"FoundPrefix({self.num_keys} keys, {len(self.tickets)} tickets)"
