# SPDX-License-Identifier: Apache-2.0
"""Holds what is known of one request, and decides which claims get its tickets. The code is pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from kvlink.control.values import Claim, Claimed, Offer


@dataclass(slots=True)
class Ticket:
    """Holds one rank's offer as it is in the store."""

    offer: Offer
    revision: int
    lease: int
    expired: bool = False
    """The ticket has expired by this coordinator's clock. The first coordinator that sees this deletes it."""
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.digest = blake2b(self.offer.ticket, digest_size=16).digest()


@dataclass(slots=True)
class Request:
    """Holds the tickets of a request by rank, and which readers claimed it.

    Claimed tickets stay until their time is over.
    """

    tickets: dict[int, Ticket] = field(default_factory=dict)
    claimed: Claimed | None = None
    claimed_revision: int = 0
    """Revision of the claim record, or 0 if there is none."""

    def is_free(self, ticket: Ticket) -> bool:
        """Returns whether a ticket is neither expired nor given to all of its readers."""
        known = self.claimed
        given = known is not None and known.complete and ticket.digest in known.tickets
        return not given and not ticket.expired

    def has_claimed_ticket(self) -> bool:
        """Returns whether a ticket of the record has not expired, so that it would be free without the record."""
        known = self.claimed.tickets if self.claimed is not None else ()
        return any(ticket.digest in known and not ticket.expired for ticket in self.tickets.values())

    def free(self) -> dict[int, Ticket]:
        """Returns the tickets that can be claimed once all ranks have offered."""
        return {rank: ticket for rank, ticket in self.tickets.items() if self.is_free(ticket)}


class Serving(NamedTuple):
    """Says which tickets a claim gets, and which record must be written first. None: it is already written."""

    tickets: tuple[Ticket, ...]
    record: Claimed | None
    before: int = 0
    """Revision of the record on which this decision is based."""


def serve(request: Request, claim: Claim) -> Serving | None:
    """Decides what a claim gets. Returns None if the request cannot be claimed yet, or can no longer be claimed."""
    known = request.claimed
    if known is not None:
        meant = _meant(known, request.tickets.values())
        if meant is not None and _had(known, claim):
            return Serving(meant, None)
    free = request.free()
    sizes = {ticket.offer.num_ranks for ticket in free.values()}
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
    """Returns the tickets of a record, or None if any is missing."""
    by_digest = {ticket.digest: ticket for ticket in tickets}
    if not all(digest in by_digest for digest in known.tickets):
        return None
    return tuple(by_digest[digest] for digest in known.tickets)


def _had(known: Claimed, claim: Claim) -> bool:
    """Returns whether a claim repeats one that was answered.

    Until all readers have claimed, the reader alone decides. Later the claim id must be the same, too.
    """
    if not known.complete:
        return claim.reader in {reader for reader, _ in known.readers}
    return bool(claim.claim_id) and (claim.reader, claim.claim_id) in known.readers
