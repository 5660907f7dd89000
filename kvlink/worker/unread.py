# SPDX-License-Identifier: Apache-2.0
"""Gives blocks back that nobody reads: one-sidedly where their owner is connected, else by its agent."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import UnknownRequest
from kvlink.layout import Assignment
from kvlink.ticket import Ticket
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull import Pull, PullStats
from kvlink.transfer.pull_start import Part, no_such_seat, settled_value, settling, within
from kvlink.worker.directory import ControlDirectory

Range = tuple[int, int] | None
"""Half open; None: all."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Of one worker. `in_background` runs a coroutine, given its request and what to call it in a log."""

    peers: Peers
    directory: ControlDirectory
    in_background: Callable[[Coroutine[Any, Any, None], str, str], None]

    def release(self, tickets: Sequence[Ticket]) -> bool:
        """Waits for nothing. False: some owners are told by their agents. Raises ConfigError for a ticket without this
        rank's seat."""
        told = True
        for ticket in tickets:
            peer = self.peers.get(ticket.worker_id, ticket.epoch)
            if peer is None or not peer.connection.settle(*_settling(ticket, peer.assignment)):
                told = False
                self.in_background(self._tell_agent(ticket), ticket.request_id, "release")
        return told

    def settle_by_agent(self, part: Part) -> None:
        """For a pull whose owner could not be told one-sidedly."""
        job = self.directory.settle(part[0], *settling(part))
        self.in_background(job, part[0].request_id, "settle")

    async def _tell_agent(self, ticket: Ticket) -> None:
        """Quiet where the owner has restarted: its leases ended then."""
        try:
            card = await self.directory.card(ticket.worker_id, ticket.epoch, ticket.agent, fresh=False)
            assignment = self.peers.assignment(card)
            if card.epoch == ticket.epoch and assignment is not None:
                await self.directory.settle(ticket, *_settling(ticket, assignment))
        except UnknownRequest:
            return


def _settling(ticket: Ticket, assignment: Assignment) -> tuple[int, int]:
    """This rank's slot, and what ends it."""
    if assignment.seat >= len(ticket.seats):
        raise no_such_seat(ticket, assignment.seat, assignment.num_seats)
    seat = ticket.seats[assignment.seat]
    return seat.slot, settled_value(ticket, seat, assignment.num_seats)


class EmptyPull(Pull):
    """A pull of no token or no layer: it has ended when it is made."""

    __slots__ = ("_release", "_settled")

    def __init__(self, request_id: str, release: Callable[[], bool], settle: bool) -> None:
        """`release` gives the blocks back, at once when `settle` is set. Raises what it raises."""
        super().__init__(request_id, [], None, None)
        self._release = release
        self._settled = settle and release()

    def settle(self) -> bool:
        """See `Pull.settle`."""
        self._settled = self._release()
        return True

    @property
    def stats(self) -> PullStats:
        """Nothing was read."""
        return PullStats(settled=self._settled)


def wants_nothing(num_blocks: int, tokens: Range, layers: Range) -> bool:
    """Whether a pull into so many blocks is empty."""
    if layers is not None and layers[0] == layers[1]:
        return True
    return num_blocks == 0 if tokens is None else tokens[0] == tokens[1]


def check_ranges(ticket: Ticket, tokens: Range, layers: Range, num_layers: int) -> None:
    """Raises ConfigError for those beyond what the ticket offers."""
    if tokens is not None:
        within(tokens, ticket.num_tokens, "tokens", ticket)
    if layers is not None:
        within(layers, num_layers, "layers", ticket)
