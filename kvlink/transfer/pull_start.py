# SPDX-License-Identifier: Apache-2.0
"""Starts pulls: at once if the owner is connected, else after connecting to all owners of the pull concurrently."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from kvlink import tracing
from kvlink.background import ControlThread
from kvlink.errors import ConfigError, PeerUnreachable, TransferError, TransferTimeout
from kvlink.forks import check_own, num_forks
from kvlink.layout import GroupsAssignment
from kvlink.runtime.supervised import guarded
from kvlink.ticket import SHARED_SEAT, LeaseSeat, Ticket
from kvlink.tracing import Kind
from kvlink.transfer.device_work import DeviceWork, until_ended
from kvlink.transfer.engine import Transfer
from kvlink.transfer.group_ids import copied, within
from kvlink.transfer.group_start import STREAM_UNITS, layers_read, start_groups
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.types import ReadyUnit

_BLOCKS, _TOKENS = ReadyUnit.BLOCKS, ReadyUnit.TOKENS

Want = tuple[Any, Any, tuple[int, int] | None, bool, float]
"""The arguments of `pull` without the ticket: into, tokens, layers, settle, timeout_s.

With several cache groups, `into` has a buffer for each, and `tokens` is one range, one for each group, or None.
"""

Part = tuple[Ticket, Peer, Transfer]
"""The share of one owner in a pull. Part and Want are tuples because every small pull creates them."""


def stop(part: Part) -> None:
    """Cancels a part. On return no more bytes of it can arrive."""
    transfer = part[2]
    transfer.cancel()
    transfer.wait(-1)


def settle_args(ticket: Ticket, assignment: GroupsAssignment) -> tuple[int, int]:
    """Returns the slot of this rank, and the value that settles it. Raises ConfigError if there is no such seat."""
    slot, _, value = _words(ticket, assignment, True)
    return slot, value


Connected = list[tuple[Ticket, Peer]]


class PullStart(concurrent.futures.Future[list[Part]]):
    """A future of the parts of a pull, resolved after all of them have started."""

    def __init__(self) -> None:
        super().__init__()
        self._made_at = num_forks()

    def check_own(self) -> None:
        """Raises ConfigError in a forked child, where no thread would ever resolve the future."""
        if not self.done():
            check_own(self._made_at, "this pull")


def start(peer: Peer, ticket: Ticket, want: Want) -> Transfer | None:
    """Starts reading from one owner. Returns None if its connection is broken. Raises ConfigError."""
    into, tokens, layers, settle, timeout_s = want
    words = lease_words(ticket, peer, settle)
    planner = peer.planner
    if planner is None or ticket.ready_unit is _TOKENS:
        return start_groups(peer, ticket, into, tokens, layers, words, timeout_s)
    units = len(ticket.block_ids) if ticket.ready_unit is _BLOCKS else peer.num_layers
    return peer.connection.pull(
        planner,
        ticket.block_ids,
        into,
        (0, ticket.num_tokens) if tokens is None else within(tokens, ticket.num_tokens, "tokens", ticket),
        (0, peer.end_layer) if layers is None else layers_read(layers, peer, ticket),
        words,
        0 if ticket.ready >= units else STREAM_UNITS[ticket.ready_unit],
        timeout_s,
    )


def lease_words(ticket: Ticket, peer: Peer, settle: bool) -> tuple[int, int, int]:
    """Returns this rank's slot, its nonce, and the value that settles it or 0. Every read takes them first.

    Raises ConfigError without a seat, and LayoutMismatch for the cache of another model.
    """
    if ticket.model != peer.model.number and peer.model.number:
        raise peer.model.refuse(ticket.model, ticket.worker_id, peer.card.layouts[0].model)
    return _words(ticket, peer, settle)


def _words(ticket: Ticket, reader: Peer | GroupsAssignment, settle: bool) -> tuple[int, int, int]:
    """Returns the words of a seat. A soft ticket has one for all ranks, see SHARED_SEAT in csrc/lease/lease_words.h."""
    seats = ticket.seats
    if seats[0].settle_nonce == SHARED_SEAT:
        return seats[0].slot, seats[0].nonce, SHARED_SEAT
    try:
        seat = seats[reader.seat]
    except IndexError:
        raise no_such_seat(ticket, reader.seat, reader.num_seats) from None
    return seat.slot, seat.nonce, settled_value(ticket, seat, reader.num_seats) if settle else 0


def no_such_seat(ticket: Ticket, seat: int, num_readers: int) -> ConfigError:
    """Returns the error for a ticket that was offered to fewer readers."""
    return ConfigError(
        f"request {ticket.request_id}: this rank reads with seat {seat} and the ticket has "
        f"{len(ticket.seats)}; offer it with readers={num_readers}"
    )


def settled_value(ticket: Ticket, seat: LeaseSeat, num_readers: int) -> int:
    """Returns the value that settles a seat, and with it the seats that the ticket has beyond its readers."""
    return seat.settle_nonce if len(ticket.seats) == num_readers else seat.settle_nonce ^ num_readers


class PullStarts:
    """The pulls that wait for their owners, and counts of pulls that never started, by the name of the exception."""

    def __init__(self, control: ControlThread) -> None:
        self.failed: Counter[str] = Counter()
        self.num_restarts = 0
        self.closing = False
        self._control = control
        self._waiting: weakref.WeakSet[PullStart] = weakref.WeakSet()

    def start(
        self,
        connect: Callable[[float], Awaitable[Connected]],
        want: Want,
        kept: Sequence[Part] = (),
        after: DeviceWork | None = None,
    ) -> PullStart:
        """Starts a pull after `connect`, whose argument is the deadline by `time.monotonic()`, has found the owners.

        `kept` are parts of the same pull that have ended. Nothing is read before `after` has ended.
        """
        deadline = time.monotonic() + want[-1]
        want = (copied(want[0]), *want[1:])  # the caller may change its block ids
        starting = PullStart()
        job = start_connected(starting, partial(connect, deadline), want, deadline, kept, after)
        running = self._control.submit(job)
        self._waiting.add(starting)

        def ended(starting: concurrent.futures.Future[list[Part]]) -> None:
            if starting.cancelled():
                running.cancel()
                self.failed["Cancelled"] += 1
            elif error := starting.exception():
                self.failed[type(error).__name__] += 1

        starting.add_done_callback(guarded("pull started", ended))
        return starting

    def cancel_all(self) -> None:
        """Cancels all waiting pulls, because the worker is closing."""
        self.closing = True
        for starting in list(self._waiting):
            starting.cancel()


async def connect_all(
    peers: Peers, tickets: Sequence[Ticket], deadline: float, *, complete: bool = False
) -> Connected:
    """Connects to the owners concurrently, and leaves out those with nothing for this rank.

    Raises KVLinkError, and with `complete` also ConfigError unless all owners of this rank's part are there.
    """
    about = {"kvlink.request_id": tickets[0].request_id}
    with tracing.span("kvlink.connect", Kind.CLIENT, tickets[0].trace, about):
        found = await asyncio.gather(*(_connect(peers, ticket, deadline) for ticket in tickets))
        if any(peer is not None and peer.connection.broken for peer in found):  # it broke meanwhile
            found = await asyncio.gather(*(_connect(peers, ticket, deadline) for ticket in tickets))
    connected = [(ticket, peer) for ticket, peer in zip(tickets, found, strict=True) if peer is not None]
    if not connected:
        raise ConfigError(f"request {tickets[0].request_id}: none of its tickets has a part for this rank")
    if complete:
        _check_complete(connected, tickets[0].request_id)
    return connected


def _check_complete(connected: Connected, request_id: str) -> None:
    """Raises ConfigError unless the tickets are those of all owners from which this rank takes a part."""
    if len({(ticket.request_id, ticket.num_tokens) for ticket, _ in connected}) > 1:
        names = sorted({f"{ticket.request_id} of {ticket.num_tokens} tokens" for ticket, _ in connected})
        raise ConfigError(f"the tickets of a pull must be of one request, and not of {', '.join(names)}")
    given = sorted(peer.rank for _, peer in connected)
    for _, peer in connected:
        if given != sorted(peer.sources):
            raise ConfigError(
                f"request {request_id}: this rank takes its part from ranks {_listed(peer.sources)} of the server of "
                f"{peer.card.worker_id}, and the tickets are of ranks {_listed(given)}; pass one ticket of each"
            )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


async def _connect(peers: Peers, ticket: Ticket, deadline: float) -> Peer | None:
    """Connects to one owner. Other pulls may wait for the same attempt, so the error names the request of this one."""
    try:
        return await peers.connect(ticket.worker_id, ticket.epoch, ticket.agent, deadline)
    except TransferError as error:
        raise type(error)(f"request {ticket.request_id}: {error}") from error


async def start_connected(
    starting: PullStart,
    connect: Callable[[], Awaitable[Connected]],
    want: Want,
    deadline: float,
    kept: Sequence[Part] = (),
    after: DeviceWork | None = None,
) -> None:
    """Resolves `starting` with the parts. It can be cancelled until the first transfer starts."""
    try:
        connected = await connect()
        if after is not None and not await until_ended(after, deadline):
            raise TransferTimeout("the work on the device that the pull comes after has not ended in time")
        if starting.set_running_or_notify_cancel():
            starting.set_result([*kept, *_start_all(connected, want, deadline)])
    except asyncio.CancelledError:
        starting.cancel()
        raise
    except Exception as error:
        if starting.running() or starting.set_running_or_notify_cancel():
            starting.set_exception(error)


def _start_all(connected: Connected, want: Want, deadline: float) -> list[Part]:
    """Starts reading from every owner. If it raises KVLinkError, no transfer runs."""
    parts: list[Part] = []
    try:
        for ticket, peer in connected:
            transfer = start(peer, ticket, (*want[:-1], max(deadline - time.monotonic(), 0.0)))
            if transfer is None:
                raise PeerUnreachable(
                    f"{ticket.worker_id} closed the connection: {peer.connection.why_broken()}"
                )
            parts.append((ticket, peer, transfer))
    except BaseException:
        for part in parts:
            stop(part)
        raise
    return parts
