# SPDX-License-Identifier: Apache-2.0
"""What the control plane's calls take and answer. Named tuples, as every handoff makes several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from kvlink.types import WorkerCard, WorkerChange


class JoinRequest(NamedTuple):
    """`card.epoch` is the epoch proposed; with `rejoin` it is one that this process has held already."""

    card: WorkerCard
    rejoin: bool = False


class Membership(NamedTuple):
    """What a worker is granted: beat every `keep_alive_s`, or be gone after `lease_s`."""

    epoch: int
    lease_s: float
    keep_alive_s: float


class Incarnation(NamedTuple):
    """The last known process of a worker_id."""

    epoch: int
    incarnation: bytes
    left: bool = False
    """It said goodbye."""


class WorkerEpoch(NamedTuple):
    """One life of a worker. Epoch 0: whichever runs now."""

    worker_id: str
    epoch: int


class Offer(NamedTuple):
    """One rank's ticket of a request. `ticket` is opaque to the control plane, and secret."""

    request_id: str
    worker_id: str
    epoch: int
    ttl_s: float
    tp_rank: int
    tp_size: int
    num_seats: int
    ticket: bytes

    def __repr__(self) -> str:
        """Without the secret."""
        return (
            f"Offer({self.request_id!r} by {self.worker_id!r} epoch {self.epoch}, {len(self.ticket)} bytes)"
        )


class Claim(NamedTuple):
    """Asks for all tickets of a request, on behalf of one of `num_readers` readers.

    Asked again with the same `claim_id`, unless that is empty, it gets the same tickets.
    """

    request_id: str
    timeout_s: float = 0.0
    reader: int = 0
    num_readers: int = 1
    claim_id: bytes = b""

    def __repr__(self) -> str:
        """Without the claim's id, which gets its tickets again."""
        return (
            f"Claim({self.request_id!r} for reader {self.reader} of {self.num_readers}, {self.timeout_s:g} s)"
        )


class Claimed(NamedTuple):
    """Who has been given the tickets of a request, as coordinators tell each other."""

    tickets: tuple[bytes, ...]
    """Digests of those that are meant, in rank order."""
    readers: tuple[tuple[int, bytes], ...]
    """(reader, claim id)"""
    complete: bool
    """All readers have claimed."""
    ttl_s: float
    """As long as any of the tickets may be offered again."""


class SettleOrder(NamedTuple):
    """Asks an owner to end one seat of a lease because the reader cannot write into the slot itself."""

    worker_id: str
    epoch: int
    slot: int
    settle_nonce: int

    def __repr__(self) -> str:
        """Without the secret."""
        return f"SettleOrder({self.worker_id!r} epoch {self.epoch}, slot {self.slot})"


class Renewal(NamedTuple):
    """Asks an owner for time: (slot, settle nonce) of seats whose readers still wait."""

    worker_id: str
    epoch: int
    seats: list[tuple[int, int]]

    def __repr__(self) -> str:
        """Without the secrets."""
        return f"Renewal({self.worker_id!r} epoch {self.epoch}, {len(self.seats)} seats)"


class PushKind(Enum):
    """What the coordinator tells a worker through its keep-alive stream."""

    ACK = 0
    REJOIN = 1
    SETTLE = 2


class Push(NamedTuple):
    """`slot` and `settle_nonce` go with SETTLE."""

    kind: PushKind
    slot: int = 0
    settle_nonce: int = 0

    def __repr__(self) -> str:
        """Without the secret."""
        return f"Push({self.kind.name}, slot {self.slot})"


class HandoffBatch(NamedTuple):
    """Operations of a handoff stream, carried out in this order."""

    offers: list[Offer]
    settles: list[SettleOrder]
    claims: list[Claim]
    withdrawn: Sequence[int] = ()
    """Numbers of claims of the stream that nobody waits for any more."""


class HandoffKind(Enum):
    """Operations are numbered for each kind."""

    OFFER = 0
    SETTLE = 1
    CLAIM = 2


class RefusedHandoff(NamedTuple):
    """The `number`th operation of its kind failed; `reason` names a `refusal.Reason`."""

    kind: HandoffKind
    number: int
    reason: str
    sentence: str


class HandoffResults(NamedTuple):
    """`offers_done` and `settles_done` count from the stream's start; `claimed` pairs number and tickets."""

    offers_done: int
    settles_done: int
    claimed: list[tuple[int, list[bytes]]]
    refused: list[RefusedHandoff]

    def __repr__(self) -> str:
        """Without the tickets."""
        done = f"{self.offers_done} offers and {self.settles_done} settles done"
        return f"HandoffResults({done}, {len(self.claimed)} claimed, {len(self.refused)} refused)"


class ConnectRequest(NamedTuple):
    """A reader's hellos, one a lane, for the owner's transport."""

    worker_id: str
    epoch: int
    transport: str
    hellos: list[bytes]
    takes_keys: bool = False

    def __repr__(self) -> str:
        """Without the hellos."""
        lanes = len(self.hellos)
        return f"ConnectRequest({self.worker_id!r} epoch {self.epoch} over {self.transport}, {lanes} lanes)"


class ConnectReply(NamedTuple):
    """The owner's replies, in the order of the hellos. Keys are given where they are no longer the card's."""

    connection_id: int
    replies: list[bytes]
    pool_keys: Sequence[bytes] = ()
    lease_keys: Sequence[bytes] = ()

    def __repr__(self) -> str:
        """Without invitations and keys."""
        return f"ConnectReply(connection {self.connection_id}, {len(self.replies)} lanes)"


class CoordinatorStatus(NamedTuple):
    """Counts since the start; `workers`, `tickets` and `waiting_claims` are of now."""

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


class StoreHealth(NamedTuple):
    """How well a coordinator's store serves it."""

    is_full: bool = False
    """It refuses new tickets, claims and joins."""
    is_lost: bool = False
    """What the coordinator knows is too old to serve claims and watches."""
    stale_s: float = 0.0
    """For how long it has not been known that the coordinator is up to date; 0: it is."""

    @property
    def is_healthy(self) -> bool:
        """Whether it does all that it is for."""
        return not self.is_full and not self.is_lost

    @classmethod
    def worst(cls, of: Iterable[StoreHealth]) -> StoreHealth:
        """Of several."""
        return cls._make(map(max, zip(cls(), *of, strict=True)))


class Nothing(NamedTuple):
    """An empty request or reply."""


WorkerChanges = list[WorkerChange]


class Watch(NamedTuple):
    """Asks for changes of these workers; of everyone, if of none."""

    worker_ids: frozenset[str] = frozenset()

    def sees(self, changes: WorkerChanges) -> WorkerChanges:
        """Those of `changes` that it asks for."""
        wanted = self.worker_ids
        return [change for change in changes if change.card.worker_id in wanted] if wanted else changes
