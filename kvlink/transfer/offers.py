# SPDX-License-Identifier: Apache-2.0
"""Implements the prefill side: offers of the blocks of requests, and the events of offers that ended."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError, UnknownRequest
from kvlink.layout import rank_of
from kvlink.runtime.durations import Durations
from kvlink.runtime.supervised import guarded
from kvlink.ticket import LeaseSeat, Ticket, check_request_id
from kvlink.transfer.device_work import DeviceWork, has_ended, until_ended
from kvlink.transfer.engine import Engine
from kvlink.transfer.group_ids import GroupIds, NumTokens
from kvlink.transfer.offer_check import checked_offer, parent_span
from kvlink.types import LeaseEvent, ReadyUnit

_MAX_EVENTS = 1 << 16  # limit for a caller that never reads events; the oldest are dropped
_TIMED_EVERY = 16
_COLLECT_EVERY = (
    64  # offers between two collections of ended leases, which bounds memory if events are never read
)


Offer = str | Ticket | LeaseSeat
"""Names an offer: a ticket or one of its seats that offer only, and a request id the live one of that name."""


@dataclass(slots=True)
class _Offered:
    lease: int
    num_blocks: int = 0
    """The number of blocks that are pinned for readers."""
    ticket: Ticket | None = None
    """None while the ticket is being made, or if the caller created the ticket."""


class Offers:
    """The live offers of one worker. Safe from any thread."""

    def __init__(self, engine: Engine, worker_id: str, epoch: int, agent: str) -> None:
        self.durations = Durations()
        """The durations of one in 16 calls of `offer`. Timing a call costs a tenth of its duration."""
        self._engine = engine
        self._worker_id = worker_id
        self._epoch = epoch
        self._agent = agent
        self._rank, self._num_ranks = rank_of(engine.pool.layout)
        self._lease_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._by_request: dict[str, _Offered] = {}
        self._requests: dict[int, str] = {}
        """Request ids by lease. An offer that was withdrawn is in neither."""
        self._events: deque[tuple[int, LeaseEvent]] = deque(maxlen=_MAX_EVENTS)
        """Each with its lease."""
        self.on_ended: Callable[[str], object] = lambda request_id: None
        self.in_background: Callable[[Coroutine[Any, Any, None], str], None]
        """Runs a coroutine in the background. The second argument is the request id for log messages."""
        self.sign: Callable[[Ticket], Ticket] = lambda ticket: ticket

    def __len__(self) -> int:
        """The number of offers whose blocks are pinned. It is updated when ended leases are collected."""
        return len(self._by_request)

    def offer(
        self,
        request_id: str,
        block_ids: GroupIds,
        *,
        num_tokens: NumTokens | None,
        ttl_s: float,
        readers: int,
        ready: int | None,
        ready_unit: ReadyUnit,
        after: DeviceWork | None = None,
        trace: str = "",
        publish: Callable[[Ticket], object] | None = None,
    ) -> Ticket:
        """See `Worker.offer`. `publish` is called with the ticket. Whatever raises, no lease is left behind."""
        lease = next(self._lease_ids)
        began = time.perf_counter_ns() if lease % _TIMED_EVERY == 1 else 0
        check_request_id(request_id)
        blocks = checked_offer(request_id, block_ids, self._engine.pool.groups, num_tokens, ready, ready_unit)
        ids, written = blocks.ids, blocks.written
        _check_terms(request_id, ttl_s, readers)
        parent = parent_span(request_id, trace)
        now = written if after is None or has_ended(after) else 0
        if request_id in self._by_request or len(self._by_request) % _COLLECT_EVERY == 0:
            self._collect()
        try:
            offered = self._begin(request_id, lease, len(ids))
            seats = self._engine.grant(lease, readers, now, ttl_s)
            unsigned = Ticket(
                request_id=request_id,
                worker_id=self._worker_id,
                epoch=self._epoch,
                agent=self._agent,
                seats=tuple(LeaseSeat(*seat) for seat in seats),
                block_ids=ids,
                num_tokens=blocks.num_tokens,
                ready=now,
                ready_unit=blocks.unit,
                rank=self._rank,
                num_ranks=self._num_ranks,
                ttl_s=ttl_s,
                group_sizes=blocks.group_sizes,
                group_tokens=blocks.group_tokens,
                trace=parent,
            )
            ticket = offered.ticket = self.sign(unsigned)  # may read files, so it runs without the lock
            if after is not None and now < written:
                self.in_background(self._ready_after(lease, after, written), request_id)
            if publish is not None:
                publish(ticket)
        except BaseException:
            self._withdraw(request_id, lease)
            raise
        if began:
            self.durations.add(time.perf_counter_ns() - began)
        return ticket

    def _begin(self, request_id: str, lease: int, num_blocks: int = 0) -> _Offered:
        """Adds an offer before its lease is granted. Raises ConfigError if the request is offered already."""
        with self._lock:
            if request_id in self._by_request:
                raise ConfigError(
                    f"request {request_id} is offered already; wait for its event or abort it before offering it again"
                )
            self._requests[lease] = request_id
            offered = self._by_request[request_id] = _Offered(lease, num_blocks)
        return offered

    def _withdraw(self, request_id: str, lease: int) -> None:
        """Ends an offer whose ticket was never returned, as far as it got. No event follows.

        The lease may have ended meanwhile, and the request may belong to another offer.
        """
        with self._lock:
            if self._requests.pop(lease, None) is None:  # it may have ended
                for entry in [entry for entry in self._events if entry[0] == lease]:
                    self._events.remove(entry)
            self._remove(request_id, lease)
        self._engine.core.abort(lease)

    def _remove(self, request_id: str, lease: int) -> None:
        """Removes the offer of a lease. A later offer of the same request stays. To be called with the lock."""
        offered = self._by_request.get(request_id)
        if offered is not None and offered.lease == lease:
            del self._by_request[request_id]

    async def _ready_after(self, lease: int, after: DeviceWork, ready: int) -> None:
        try:
            await until_ended(after)
        except BaseException:
            self._engine.core.abort(lease)  # the content of the blocks is not known
            raise
        self._engine.core.set_ready(lease, ready)  # False if the lease has ended, which is no error here

    def grant_at(self, request_id: str, seats: Sequence[LeaseSeat], ttl_s: float) -> None:
        """Takes a lease at seats that the caller chose, for a ticket that the caller creates.

        A scheduler can then answer a request without asking its workers, which all hold the same seats. The lease ends
        with an event, as after `offer`.

        seats: their slots must be free (1 to KVLINK_LEASE_SLOTS) and their nonces random.
        Raises ConfigError if the request is offered already or a seat is not valid.
        """
        check_request_id(request_id)
        lease = next(self._lease_ids)
        rows = [(seat.slot, seat.nonce, seat.settle_nonce) for seat in seats]
        try:
            self._begin(request_id, lease)
            self._engine.core.grant_at(lease, rows, 0, ttl_s)
        except BaseException:
            self._withdraw(request_id, lease)
            raise

    def set_ttl(self, offer: Offer, ttl_s: float) -> None:
        """Makes an offer end `ttl_s` seconds from now, even if that is sooner than before. Raises UnknownRequest."""
        self._check_live(offer, self._engine.core.set_ttl(self.lease_of(offer), ttl_s))

    def hand_off(self, offer: Offer, num_blocks: int, ttl_s: float) -> None:
        """Records that the caller has sent its ticket, so that `num_blocks` blocks stay pinned for `ttl_s` seconds.

        Raises UnknownRequest.
        """
        lease = self.lease_of(offer)
        self._check_live(offer, self._engine.core.set_ttl(lease, ttl_s))
        with self._lock:
            offered = self._by_request.get(self._requests.get(lease, ""))
            if offered is not None and offered.lease == lease:
                offered.num_blocks = num_blocks

    def set_ready(self, offer: Offer, ready: int) -> None:
        """See `Worker.set_ready`."""
        self._check_live(offer, self._engine.core.set_ready(self.lease_of(offer), ready))

    def extend(self, offer: Offer, ttl_s: float) -> None:
        """See `Worker.extend`."""
        self._check_live(offer, self._engine.core.extend(self.lease_of(offer), ttl_s))

    def abort(self, offer: Offer) -> None:
        """See `Worker.abort`."""
        self._engine.core.abort(self.lease_of(offer))

    def events(self) -> list[LeaseEvent]:
        """See `Worker.events`."""
        self._collect()
        with self._lock:
            events = [event for _, event in self._events]
            self._events.clear()
        return events

    def _collect(self) -> None:
        for ended in self._engine.take_ended():
            request_id = self._requests.get(ended.lease)
            if request_id is None:  # withdrawn
                continue
            guarded("end of an offer", self.on_ended)(request_id)  # before the request may be offered again
            with self._lock:
                if self._requests.pop(ended.lease, None) is None:  # withdrawn meanwhile
                    continue
                self._remove(request_id, ended.lease)
                self._events.append((ended.lease, LeaseEvent(request_id, ended.how, ended.held_s)))

    def tickets(self) -> list[Ticket]:
        """Returns the tickets of the live offers."""
        with self._lock:
            return [offered.ticket for offered in self._by_request.values() if offered.ticket]

    def num_pinned_blocks(self) -> int:
        """Returns the number of blocks of the live offers. A block of two offers counts twice."""
        self._collect()
        with self._lock:
            return sum(offered.num_blocks for offered in self._by_request.values())

    def lease_of(self, offer: Offer) -> int:
        """Returns the number of an offer's lease. Raises UnknownRequest.

        A ticket or a seat names this offer only, and a request id the live one, which may be a later one.
        """
        if isinstance(offer, (Ticket, LeaseSeat)):
            seat = offer.seats[0] if isinstance(offer, Ticket) else offer
            here = not isinstance(offer, Ticket) or (offer.worker_id, offer.epoch) == (
                self._worker_id,
                self._epoch,
            )
            lease = self._engine.core.lease_at(seat.slot, seat.settle_nonce) if here else 0
            self._check_live(offer, lease > 0)
            return lease
        with self._lock:
            offered = self._by_request.get(offer) if isinstance(offer, str) else None
        if offered is None:
            check_request_id(offer)
            raise UnknownRequest(f"request {offer} is not offered by {self._worker_id}")
        return offered.lease

    def _check_live(self, offer: Offer, is_live: bool) -> None:
        if not is_live:
            what = offer if isinstance(offer, str) else getattr(offer, "request_id", "with this seat")
            raise UnknownRequest(f"the offer of request {what} by {self._worker_id} has ended")


def _check_terms(request_id: str, ttl_s: float, readers: int) -> None:
    if not 0 < ttl_s <= 86400 or not 1 <= readers <= 255:
        raise ConfigError(f"offer {request_id}: ttl_s must be in (0, 86400] and readers 1 to 255")
