# SPDX-License-Identifier: Apache-2.0
"""Finds the owners of a pull by its tickets, or by claiming its request at the coordinator."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout, rank_of
from kvlink.ticket import Ticket, check_request_id
from kvlink.transfer import spans
from kvlink.transfer.group_ids import TokenRanges
from kvlink.transfer.pull import Pull
from kvlink.transfer.pulls import Claim
from kvlink.worker.membership import WorkerMembership
from kvlink.worker.unread import EmptyPull, Range, Releaser, check_ranges

Tickets = Ticket | str | Sequence[Ticket | str]

_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one worker's pulls.

    `checked` returns a ticket that the worker may use, and raises AccessDenied for any other.
    """

    membership: WorkerMembership
    layout: KVLayout
    checked: Callable[[Ticket], Ticket]
    releaser: Releaser

    def of(self, ticket: Tickets) -> tuple[str, Sequence[Ticket] | Claim]:
        """Returns the request id with its tickets, or with what claims them. Raises ConfigError, AccessDenied."""
        if isinstance(ticket := parsed(ticket), str):
            self.require_coordinator(ticket)
            return ticket, functools.partial(self._claim_until, ticket)
        tickets = self._tickets(ticket)
        return tickets[0].request_id, tickets

    def release(self, ticket: Tickets, timeout_s: float) -> bool:
        """Releases blocks as `Worker.release` does. A claim waits at most `timeout_s` seconds.

        Returns False if not all owners were released one-sidedly, or not yet.
        """
        if not isinstance(ticket := parsed(ticket), str):
            return self.releaser.release(self._tickets(ticket))
        self.require_coordinator(ticket)
        self.releaser.in_background(self._claim_and_release(ticket, timeout_s), ticket, "release")
        return False

    def empty_pull(
        self, ticket: Tickets, tokens: TokenRanges | None, layers: Range, settle: bool, timeout_s: float
    ) -> Pull:
        """Returns a pull without bytes, see `is_empty`. Raises ConfigError, AccessDenied."""
        ticket = parsed(ticket)
        tickets = [] if isinstance(ticket, str) else self._tickets(ticket)
        for each in tickets:
            check_ranges(each, tokens, layers, self.layout.total_layers)
        request_id = ticket if isinstance(ticket, str) else tickets[0].request_id
        return EmptyPull(request_id, functools.partial(self.release, ticket, timeout_s), settle)

    def require_coordinator(self, request_id: str) -> None:
        """Raises ConfigError if there is none to claim a request at."""
        self.membership.require_coordinator(f"request {request_id}: claiming by id")

    def _tickets(self, ticket: Ticket | Sequence[Ticket | str]) -> list[Ticket]:
        given = [ticket] if isinstance(ticket, Ticket) else ticket
        tickets = [self.checked(_ticket(each)) for each in given]
        if not tickets:
            raise ConfigError("the list of tickets is empty; pass at least one ticket")
        return tickets

    async def claim(self, request_id: str, timeout_s: float) -> list[Ticket]:
        """Claims a request within `timeout_s` seconds. Raises AccessDenied, UnknownRequest, CoordinatorUnavailable."""
        claiming = self.membership.claim(request_id, timeout_s, *rank_of(self.layout))
        return [*map(self.checked, await spans.record_claim(request_id, claiming))]

    async def _claim_until(self, request_id: str, deadline: float) -> list[Ticket]:
        return await self.claim(request_id, max(deadline - time.monotonic(), _LEAST_S))

    async def _claim_and_release(self, request_id: str, timeout_s: float) -> None:
        self.releaser.release(await self.claim(request_id, timeout_s))


def parsed(ticket: Tickets | None, request_id: str | None = None) -> Tickets:
    """Returns tickets or a request id, with the text of a ticket parsed.

    Raises ConfigError unless exactly one of both arguments is given and valid.
    """
    if (ticket is None) is (request_id is None):
        raise ConfigError(
            "pass either a ticket or request_id=" + (", not both" if request_id is not None else "")
        )
    if request_id is not None:
        check_request_id(request_id)
        return request_id
    if isinstance(ticket, str):
        if Ticket.is_text(ticket):
            return Ticket.from_text(ticket)
        check_request_id(ticket)
    elif not isinstance(ticket, (Ticket, Sequence)) or isinstance(ticket, (bytes, bytearray)):
        raise ConfigError(
            f"pass a Ticket, its text, a list of them or a request id, not {type(ticket).__name__}"
        )
    return ticket


def _ticket(given: object) -> Ticket:
    if isinstance(given, str):
        return Ticket.from_text(given)
    if not isinstance(given, Ticket):
        raise ConfigError(f"a list of tickets must hold tickets only, not {type(given).__name__}")
    return given
