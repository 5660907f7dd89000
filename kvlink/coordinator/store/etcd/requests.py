# SPDX-License-Identifier: Apache-2.0
"""What is known of one request, and who may have its tickets. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from kvlink.control.values import Claim, Claimed, Offer


@dataclass(slots=True)
class Ticket:
    """One rank's offer as the store has it."""

    offer: Offer
    revision: int
    lease: int
    expired: bool = False
    """By this coordinator's clock; whoever's clock says so deletes it."""
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.digest = blake2b(self.offer.ticket, digest_size=16).digest()


@dataclass(slots=True)
class Request:
    """Tickets by rank, those that were claimed among them until their time is over, and who claimed."""

    tickets: dict[int, Ticket] = field(default_factory=dict)
    claimed: Claimed | None = None
    claimed_revision: int = 0
    """0: there is no record."""

    def is_free(self, ticket: Ticket) -> bool:
        """Neither given to all of its readers nor expired."""
        known = self.claimed
        given = known is not None and known.complete and ticket.digest in known.tickets
        return not given and not ticket.expired

    def free(self) -> dict[int, Ticket]:
        """The tickets that can be claimed once they are complete."""
        return {rank: ticket for rank, ticket in self.tickets.items() if self.is_free(ticket)}


class Serving(NamedTuple):
    """What a claim gets, and the record to write first; None: it stands written already."""

    tickets: tuple[Ticket, ...]
    record: Claimed | None
    before: int = 0
    """Revision of the record that this was decided by."""


def serve(request: Request, claim: Claim) -> Serving | None:
    """None: nothing to claim yet, or any more."""
    known = request.claimed
    if known is not None:
        meant = _meant(known, request.tickets.values())
        if meant is not None and _had(known, claim):
            return Serving(meant, None)
    free = request.free()
    sizes = {ticket.offer.tp_size for ticket in free.values()}
    if sizes != {len(free)}:
        return None
    tickets = tuple(free[rank] for rank in sorted(free))
    digests = tuple(ticket.digest for ticket in tickets)
    before = known.readers if known is not None and known.tickets == digests else ()
    readers = (*before, (claim.reader, claim.claim_id))
    num_seats = max(ticket.offer.num_seats for ticket in tickets)
    complete = len({reader for reader, _ in readers}) >= max(claim.num_readers, num_seats)
    ttl_s = max(ticket.offer.ttl_s for ticket in tickets)
    return Serving(tickets, Claimed(digests, readers, complete, ttl_s), request.claimed_revision)


def _meant(known: Claimed, tickets: Iterable[Ticket]) -> tuple[Ticket, ...] | None:
    """The tickets of a record, if all are there."""
    by_digest = {ticket.digest: ticket for ticket in tickets}
    if not all(digest in by_digest for digest in known.tickets):
        return None
    return tuple(by_digest[digest] for digest in known.tickets)


def _had(known: Claimed, claim: Claim) -> bool:
    """A reader may ask again: until all have claimed without an id, later only under the one it had."""
    if not known.complete:
        return claim.reader in {reader for reader, _ in known.readers}
    return bool(claim.claim_id) and (claim.reader, claim.claim_id) in known.readers
