# SPDX-License-Identifier: Apache-2.0
"""Mirrors the shared state in one coordinator, from the ordered changes that etcd sends. The code is pure."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlink.control.codec import StoredRecords
from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import RefusedError
from kvlink.control.values import Incarnation, SettleOrder, WorkerChanges
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd import keys
from kvlink.coordinator.store.etcd.keys import Key, Keys
from kvlink.coordinator.store.etcd.requests import Request, Ticket
from kvlink.coordinator.store.members import num_bytes
from kvlink.coordinator.store.waiting_claims import MAX_DUE
from kvlink.errors import ConfigError
from kvlink.runtime.supervised import survived
from kvlink.types import Joined, WorkerCard, WorkerChange
from kvlink.v1 import etcd_pb2 as pb

LONGEST_WRITE_S = 10.0
"""A claim record outlives its tickets by this, because one of them may be offered again in its last moment.

etcd ends a write after 7 s at its default election timeout, and a coordinator after 2.5 s.
"""
RECORD = -1
"""This value in place of a rank means the claim record of a request."""

_ORDER = (keys.EPOCHS, keys.WORKERS, keys.TICKETS, keys.CLAIMS, keys.SETTLES)

_log = logging.getLogger("kvlink.control")


class Member(NamedTuple):
    """A joined worker."""

    card: WorkerCard
    lease: int
    revision: int


@dataclass(slots=True)
class News:
    """Lists changes that others wait for."""

    workers: WorkerChanges = field(default_factory=list)
    requests: dict[str, None] = field(default_factory=dict)
    orders: list[tuple[bytes, SettleOrder]] = field(default_factory=list)


class Mirror:
    """Mirrors the state of one tenant, and takes one revision at a time. `now` is in seconds of a monotonic clock."""

    def __init__(self, layout: Keys, limits: Limits) -> None:
        self._layout = layout
        self._limits = limits
        self.members: dict[str, Member] = {}
        self.incarnations: dict[str, tuple[Incarnation, int]] = {}
        """Maps each worker_id to its last known process and the revision of that record."""
        self.requests: dict[str, Request] = {}
        self.orders: dict[str, dict[bytes, SettleOrder]] = {}
        self.due: Deadlines[tuple[str, int]] = Deadlines()
        self._free: dict[str, set[tuple[str, int]]] = {}
        self._ended: OrderedDict[str, RefusedError] = OrderedDict()
        self.num_free = self.card_bytes = 0
        self.num_expired = 0
        self.num_lost = 0

    def replace_all(self, kvs: list[pb.KeyValue], now: float) -> News:
        """Replaces the state by a complete listing in one go."""
        return self.apply(self.changes_to(kvs), now)

    def changes_to(self, kvs: list[pb.KeyValue]) -> list[pb.Event]:
        """Returns what leads to a complete listing. Known keys that are not in it count as deleted."""
        listed = {kv.key for kv in kvs}
        gone = [key for key in self._known_keys() if key not in listed]
        events = [pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key)) for key in gone]
        return [*events, *(pb.Event(kv=kv) for kv in kvs)]

    def parts(self, events: list[pb.Event]) -> Iterator[list[pb.Event]]:
        """Divides a large revision, such as the end of a worker with many tickets. Workers come first, as in `apply`.

        Between two parts a ticket may seem free. A claim of it compares revisions with etcd's, and fails. Parts are
        empty while the events are sorted.
        """
        if len(events) <= MAX_DUE:
            yield events
            return
        by_kind: dict[bytes, list[pb.Event]] = {kind: [] for kind in _ORDER}
        for at in range(0, len(events), MAX_DUE):
            for event in events[at : at + MAX_DUE]:
                if (key := self._layout.parse(event.kv.key)) is not None:
                    by_kind[key.kind].append(event)
            yield []
        for same in by_kind.values():
            for at in range(0, len(same), MAX_DUE):
                yield same[at : at + MAX_DUE]

    def forget_requests(self) -> None:
        """Drops all requests before a listing of another history, whose revisions cannot be compared to known ones."""
        self.requests.clear()
        self.due = Deadlines()
        self._free.clear()
        self.num_free = 0

    def _known_keys(self) -> list[bytes]:
        layout = self._layout
        return [
            *map(layout.worker, self.members),
            *map(layout.epoch, self.incarnations),
            *(
                layout.ticket(name, rank)
                for name, request in self.requests.items()
                for rank in request.tickets
            ),
            *(
                layout.claim_record(name)
                for name, request in self.requests.items()
                if request.claimed_revision
            ),
            *(key for orders in self.orders.values() for key in orders),
        ]

    def apply(self, events: list[pb.Event], now: float) -> News:
        """Applies one revision. Workers come first, because why a ticket was deleted depends on its worker."""
        news = News()
        by_kind: dict[bytes, list[tuple[Key, pb.Event]]] = {}
        for event in events:
            if (key := self._layout.parse(event.kv.key)) is not None:
                by_kind.setdefault(key.kind, []).append((key, event))
        for kind in _ORDER:
            for key, event in by_kind.get(kind, ()):
                self._note(key, event, now, news)
        for name in news.requests:
            request = self.requests.get(name)
            if request is not None and not request.tickets and not request.claimed_revision:
                del self.requests[name]
        return news

    def _note(self, key: Key, event: pb.Event, now: float, news: News) -> None:
        try:
            self._note_known(key, event, now, news)
        except (ConfigError, ValueError) as error:
            _log.warning(
                "ignoring a key in etcd that is malformed or of another version key=%r error=%s",
                event.kv.key,
                error,
            )
        except Exception as error:
            survived("etcd watch", error)

    def _note_known(self, key: Key, event: pb.Event, now: float, news: News) -> None:
        if key.kind == keys.EPOCHS:
            self._note_incarnation(key.name, event)
        elif key.kind == keys.WORKERS:
            self._note_worker(key.name, event, news)
        elif key.kind == keys.TICKETS:
            news.requests[key.name] = None
            self._note_ticket(key.name, int(key.part), event, now)
        elif key.kind == keys.CLAIMS:
            news.requests[key.name] = None
            self._note_claim(key.name, event, now)
        else:
            self._note_order(key.name, event, news)

    def _note_incarnation(self, worker_id: str, event: pb.Event) -> None:
        if event.type == pb.Event.DELETE:
            self.incarnations.pop(worker_id, None)
        else:
            incarnation = StoredRecords.INCARNATION.decode(event.kv.value)
            self.incarnations[worker_id] = (incarnation, event.kv.mod_revision)

    def _note_worker(self, worker_id: str, event: pb.Event, news: News) -> None:
        before = self.members.get(worker_id)
        if event.type == pb.Event.DELETE:
            if before is not None:
                del self.members[worker_id]
                self.card_bytes -= num_bytes(before.card)
                self.num_lost += not self._has_left(worker_id)
                news.workers.append(WorkerChange(Joined.DOWN, before.card))
            return
        card = StoredRecords.CARD.decode(event.kv.value)
        self.card_bytes += num_bytes(card) - (num_bytes(before.card) if before is not None else 0)
        self.members[worker_id] = Member(card, event.kv.lease, event.kv.mod_revision)
        if before is not None and before.card.epoch != card.epoch:
            news.workers.append(WorkerChange(Joined.DOWN, before.card))
        if before is None or before.card != card:
            news.workers.append(WorkerChange(Joined.UP, card))

    def _note_ticket(self, name: str, rank: int, event: pb.Event, now: float) -> None:
        request = self.requests.setdefault(name, Request())
        before = request.tickets.get(rank)
        if event.type == pb.Event.DELETE:
            if before is not None:
                if request.is_free(before):
                    self._end(name, self._why_gone(name, before))
                self._set_free(name, rank, before, False)
                self.due.discard((name, rank))
                del request.tickets[rank]
            return
        if before is not None:
            if before.revision == event.kv.mod_revision:
                return
            self._set_free(name, rank, before, False)
        offer = StoredRecords.OFFER.decode(event.kv.value)
        if (offer.request_id, offer.rank) != (name, rank):
            raise ConfigError(f"it holds rank {offer.rank} of {offer.request_id!r}")
        ticket = request.tickets[rank] = Ticket(offer, event.kv.mod_revision, event.kv.lease)
        self._set_free(name, rank, ticket, request.is_free(ticket))
        self.due.set((name, rank), now + offer.ttl_s)
        self._ended.pop(name, None)

    def _note_claim(self, name: str, event: pb.Event, now: float) -> None:
        request = self.requests.setdefault(name, Request())
        if event.type == pb.Event.DELETE:
            request.claimed, request.claimed_revision = None, 0
            self.due.discard((name, RECORD))
        elif request.claimed_revision != event.kv.mod_revision:
            request.claimed = StoredRecords.CLAIMED.decode(event.kv.value)
            request.claimed_revision = event.kv.mod_revision
            self.due.set((name, RECORD), now + request.claimed.ttl_s + LONGEST_WRITE_S)
        for rank, ticket in request.tickets.items():
            self._set_free(name, rank, ticket, request.is_free(ticket))

    def _note_order(self, worker_id: str, event: pb.Event, news: News) -> None:
        orders = self.orders.setdefault(worker_id, {})
        if event.type == pb.Event.DELETE:
            orders.pop(event.kv.key, None)
            if not orders:
                del self.orders[worker_id]
        elif event.kv.key not in orders:
            order = orders[event.kv.key] = StoredRecords.SETTLE.decode(event.kv.value)
            news.orders.append((event.kv.key, order))

    def expire(self, now: float) -> list[tuple[str, int]]:
        """Ends some tickets whose time is over. Returns (request id, rank or RECORD) of keys that can be deleted."""
        over = []
        for name, rank in self.due.due(now, MAX_DUE):
            if rank == RECORD:
                if self.requests[name].has_claimed_ticket():
                    self.due.set((name, RECORD), now + LONGEST_WRITE_S)
                else:
                    over.append((name, rank))
                continue
            over.append((name, rank))
            ticket = self.requests[name].tickets[rank]
            if self.requests[name].is_free(ticket):
                self._end(name, refusals.expired(ticket.offer))
                self.num_expired += 1
            ticket.expired = True
            self._set_free(name, rank, ticket, False)
        return over

    def num_free_of(self, worker_id: str) -> int:
        """Returns the number of a worker's tickets that can be claimed."""
        return len(self._free.get(worker_id, ()))

    def why_ended(self, request_id: str) -> RefusedError | None:
        """Returns why a request ended unclaimed, or None if it did not or was offered again."""
        ended = self._ended.get(request_id)
        return RefusedError(ended.reason, ended.sentence) if ended is not None else None

    def _why_gone(self, request_id: str, ticket: Ticket) -> RefusedError:
        worker_id = ticket.offer.worker_id
        member = self.members.get(worker_id)
        if member is None:
            left = self._has_left(worker_id)
            why = refusals.has_left(worker_id) if left else refusals.stopped_beating(worker_id)
            return refusals.gone_with_worker(request_id, why)
        if member.lease != ticket.lease:
            why = refusals.has_restarted(worker_id, member.card.epoch)
            return refusals.gone_with_worker(request_id, why)
        self.num_expired += 1  # another coordinator deleted it first
        return refusals.expired(ticket.offer)

    def _has_left(self, worker_id: str) -> bool:
        known = self.incarnations.get(worker_id)
        return known is not None and known[0].left

    def _end(self, request_id: str, why: RefusedError) -> None:
        self._ended[request_id] = why
        if len(self._ended) > self._limits.remembered_requests:
            self._ended.popitem(last=False)

    def _set_free(self, request_id: str, rank: int, ticket: Ticket, free: bool) -> None:
        mine = self._free.setdefault(ticket.offer.worker_id, set())
        before = len(mine)
        (mine.add if free else mine.discard)((request_id, rank))
        self.num_free += len(mine) - before
        if not mine:
            del self._free[ticket.offer.worker_id]
        assert self.num_free >= len(mine)
        assert not (free and ticket.expired)
