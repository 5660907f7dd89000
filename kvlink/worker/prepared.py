# SPDX-License-Identifier: Apache-2.0
"""Plans a pull once for tickets that offer the same blocks again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlink.config.timeouts import checked
from kvlink.errors import ConfigError
from kvlink.ticket import Ticket
from kvlink.transfer.engine import PreparedPlan
from kvlink.transfer.group_ids import within
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull import Pull
from kvlink.transfer.pull_request import layers_read, lease_words, stream_of
from kvlink.transfer.pulls import Pulls


def check_ticket(ticket: object) -> None:
    """Raises ConfigError unless `ticket` is a Ticket. The error does not quote a text, which may be a secret ticket."""
    if not isinstance(ticket, Ticket):
        raise ConfigError(
            f"a Ticket is needed, not {type(ticket).__name__}; Ticket.from_text makes one of its text"
        )


@dataclass(frozen=True, slots=True)
class Reader:
    """The worker that a prepared pull reads for. `pull` is `Worker.pull`."""

    peers: Peers
    checked: Callable[[Ticket], Ticket]
    pulls: Pulls
    pull: Callable[..., Pull]
    timeout_s: float


class PreparedPull:
    """A pull of one list of an owner's blocks into one list of blocks here, see `Worker.prepare`. Thread-safe.

    It keeps the plan of the reads. A pull under a further ticket only validates the lease of that ticket.
    """

    __slots__ = ("_into", "_planned", "_ranges", "_reader", "_ticket")

    def __init__(
        self,
        reader: Reader,
        peer: Peer | None,
        ticket: Ticket,
        into: Any,
        ranges: tuple[tuple[int, int] | None, tuple[int, int] | None],
    ) -> None:
        """Plans the reads. Raises ConfigError as `Worker.pull` does, and for a pool of several cache groups."""
        self._reader, self._ticket, self._into, self._ranges = reader, ticket, into, ranges
        self._planned = (peer, self._plan(peer))

    def _plan(self, peer: Peer | None) -> PreparedPlan:
        ticket, (tokens, layers) = self._ticket, self._ranges
        if peer is None or not peer.is_alone or peer.planner is None or len(self._into) == 0:
            raise ConfigError(
                f"request {ticket.request_id}: a prepared pull reads one cache group from one owner; use `pull`"
            )
        return peer.connection.prepare(
            peer.planner,
            ticket.block_ids,
            self._into,
            (0, ticket.num_tokens) if tokens is None else within(tokens, ticket.num_tokens, "tokens", ticket),
            (0, peer.end_layer) if layers is None else layers_read(layers, peer, ticket),
        )

    def pull(self, ticket: Ticket, *, settle: bool = True, timeout_s: float | None = None) -> Pull:
        """Starts reading the blocks under the lease of `ticket`. The arguments are those of `Worker.pull`.

        It does what `Worker.pull` does while the owner is not connected, and for a ticket whose blocks are not all
        written. Raises ConfigError for a ticket of other blocks or of another owner.
        """
        reader, first = self._reader, self._ticket
        check_ticket(ticket)
        if (
            ticket.block_ids != first.block_ids
            or ticket.num_tokens != first.num_tokens
            or ticket.worker_id != first.worker_id
        ):
            raise ConfigError(
                f"request {ticket.request_id}: the ticket offers other blocks than that of request "
                f"{first.request_id}, with which the pull was prepared; use `pull`, or prepare another one"
            )
        limit_s = reader.timeout_s if timeout_s is None else checked(timeout_s)
        peer = reader.peers.get(reader.checked(ticket).worker_id, ticket.epoch)
        if peer is not None and not stream_of(peer, ticket):
            planned_for, plan = self._planned
            if planned_for is not peer:  # connected again: the regions may have other numbers
                plan = self._plan(peer)
                self._planned = (peer, plan)
            core = plan.pull(lease_words(ticket, peer, settle), limit_s)
            if core is not None:
                return reader.pulls.started(core, ticket, peer, self._into, *self._ranges, settle)
        tokens, layers = self._ranges
        return reader.pull(ticket, self._into, tokens=tokens, layers=layers, settle=settle, timeout_s=limit_s)
