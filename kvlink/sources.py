# SPDX-License-Identifier: Apache-2.0
"""Where the owners of a pull are found: named by tickets, or by claiming a request at the coordinator."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvlink import traced
from kvlink.errors import ConfigError
from kvlink.layout import KVLayout
from kvlink.peers import Peers
from kvlink.presence import Presence
from kvlink.starting import Connected, connect_all
from kvlink.ticket import Ticket

Tickets = Ticket | str | Sequence[Ticket]

_LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Sources:
    """Of one worker. `checked` returns a ticket that the worker may use; it raises AccessDenied."""

    peers: Peers
    presence: Presence
    layout: KVLayout
    checked: Callable[[Ticket], Ticket]

    def of(self, ticket: Tickets) -> tuple[str, Callable[[float], Awaitable[Connected]]]:
        """The request, and what finds and connects its owners until a deadline. Raises ConfigError, AccessDenied."""
        if isinstance(ticket, str):
            self.presence.require_coordinator(f"request {ticket}: claiming by id")
            return ticket, partial(self._claim_and_connect, ticket)
        tickets = [ticket] if isinstance(ticket, Ticket) else [*map(self.checked, ticket)]
        if not tickets:
            raise ConfigError("pull needs at least one ticket")
        return tickets[0].request_id, partial(connect_all, self.peers, tickets)

    async def _claim_and_connect(self, request_id: str, deadline: float) -> Connected:
        left_s = max(deadline - time.monotonic(), _LEAST_S)
        claiming = self.presence.claim(request_id, left_s, self.layout.tp_rank, self.layout.tp_size)
        tickets = await traced.claimed(request_id, claiming)
        return await connect_all(self.peers, [*map(self.checked, tickets)], deadline)
