# SPDX-License-Identifier: Apache-2.0
"""Releases blocks that this worker does not read: one-sidedly if their owner is connected, else through its agent."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink import _core
from kvlink.control import SettleOrder
from kvlink.errors import UnknownRequest
from kvlink.ticket import Ticket
from kvlink.transfer.group_ids import TokenRanges, each_range, within
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull import Pull, PullStats
from kvlink.transfer.pull_request import settle_args
from kvlink.types import WorkerCard
from kvlink.worker.directory import ControlDirectory

Range = tuple[int, int] | None
"""A half-open range. None stands for all."""


@dataclass(frozen=True, slots=True)
class Releaser:
    """Releases blocks for one worker. `in_background` runs a coroutine, given its request id and its name for a log."""

    peers: Peers
    directory: ControlDirectory
    in_background: Callable[[Coroutine[Any, Any, None], str, str], None]

    def release(self, tickets: Sequence[Ticket]) -> bool:
        """Settles the tickets without blocking. Returns False if some are settled through agents in the background.

        Soft tickets need no settle. Raises ConfigError for a ticket that has no seat for this rank.
        """
        one_sided = True
        for ticket in tickets:
            if ticket.soft:
                continue
            peer = self.peers.get(ticket.worker_id, ticket.epoch)
            if peer is None or not peer.connection.settle(*settle_args(ticket, peer.assignment)):
                one_sided = False
                self.in_background(self._release_by_agent(ticket), ticket.request_id, "release")
        return one_sided

    def settle_by_agent(
        self, card: WorkerCard, slot: int, settled: int, ticket: Ticket | None = None
    ) -> None:
        """Settles a seat, in the background, whose owner could not be told one-sidedly."""
        about = card.worker_id if ticket is None else ticket.request_id
        trace = None if ticket is None else ticket.trace
        self.in_background(
            self.directory.settle(SettleOrder(card.worker_id, card.epoch, slot, settled), card.agent, trace),
            about,
            "settle",
        )

    async def _release_by_agent(self, ticket: Ticket) -> None:
        """Settles a ticket through its agent. An owner that has restarted is no error, because its leases ended."""
        try:
            card = await self.directory.card(ticket.worker_id, ticket.epoch, ticket.agent, fresh=False)
            assignment = self.peers.assignment(card)
            if card.epoch == ticket.epoch and assignment is not None:
                order = SettleOrder(ticket.worker_id, ticket.epoch, *settle_args(ticket, assignment))
                await self.directory.settle(order, ticket.agent, ticket.trace)
        except UnknownRequest:
            return


class EmptyPull(Pull):
    """A pull of no token or no layer, which has ended when it is created."""

    def __init__(self, request_id: str, release: Callable[[], bool], settle: bool) -> None:
        """Calls `release`, which settles the offer, at once if `settle` is set. Raises the errors of `release`."""
        super().__init__(_core.Pull.empty(), request_id, [])
        self._release = release
        self._settled = settle and release()

    def settle(self) -> bool:
        """See `Pull.settle`."""
        self._settled = self._release()
        return True

    @property
    def stats(self) -> PullStats:
        """The statistics, in which only `settled` is set."""
        return PullStats(settled=self._settled)


def is_empty(num_blocks: int, tokens: TokenRanges | None, layers: Range) -> bool:
    """Returns whether a pull into `num_blocks` blocks reads nothing."""
    if layers is not None and layers[0] == layers[1]:
        return True
    if tokens is None:
        return num_blocks == 0
    return all(first == end for first, end in each_range(tokens))


def check_ranges(ticket: Ticket, tokens: TokenRanges | None, layers: Range, num_layers: int) -> None:
    """Raises ConfigError for a range that exceeds the offer of the ticket."""
    for each in each_range(tokens) if tokens is not None else ():
        within(each, ticket.num_tokens, "tokens", ticket)
    if layers is not None:
        within(layers, num_layers, "layers", ticket)
