# SPDX-License-Identifier: Apache-2.0
"""Writes tickets into etcd by compare-and-set, and deletes them when their time is over."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlink.control.codec import StoredRecords
from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import named
from kvlink.control.values import Offer
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd.api import delete, get, leased, put, unchanged
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.membership import MAX_TRIES, Membership
from kvlink.coordinator.store.etcd.mirror import RECORD, Mirror
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.coordinator.store.waiting_claims import MAX_DUE
from kvlink.runtime.supervised import for_each, guarded
from kvlink.v1 import etcd_pb2 as pb

_COLLECT_WITHIN_S = 2.0
"""Every coordinator deletes an expired key after a random part of this, so that usually only one does."""


class _Stored(NamedTuple):
    """Describes a ticket in etcd. Revision 0 means that there is none."""

    revision: int = 0
    lease: int = 0
    ticket: bytes = b""


@dataclass(slots=True, eq=False, repr=False)
class EtcdOffers:
    """Writes and deletes tickets in etcd. Raises RefusedError, or CoordinatorUnavailable if etcd does not answer."""

    _layout: Keys
    _mirror: Mirror
    _sync: Sync
    _membership: Membership
    _commits: GroupCommit
    _limits: Limits
    _garbage: Deadlines[tuple[str, int]] = field(default_factory=Deadlines)

    async def offer(self, offer: Offer) -> None:
        """Implements Store.offer."""
        stored = self._admit(offer)
        for _ in range(MAX_TRIES):
            member = await self._membership.own(offer.worker_id, offer.epoch)
            if (stored.ticket, stored.lease) == (offer.ticket, member.lease):
                return
            worker_key = self._layout.worker(offer.worker_id)
            key = self._layout.ticket(offer.request_id, offer.rank)
            txn = pb.TxnRequest(
                compare=[leased(worker_key, member.lease), unchanged(key, stored.revision)],
                success=[put(key, StoredRecords.OFFER.encode(offer), member.lease)],
                failure=[get(worker_key), get(key)],
            )
            done = await self._commits.submit(txn, key)
            if done.succeeded:
                return
            workers, tickets = (response.response_range.kvs for response in done.responses)
            if not workers or workers[0].lease != member.lease:
                await self._sync.pulse()  # the worker restarted or is gone, and the mirror does not know yet
            stored = self._read(tickets[0], offer) if tickets else _Stored()
        raise refusals.write_conflict(f"request {named(offer.request_id)}", MAX_TRIES)

    def _admit(self, offer: Offer) -> _Stored:
        """Returns what the mirror has of this rank. Raises RefusedError (MALFORMED, TOO_MANY)."""
        request = self._mirror.requests.get(offer.request_id)
        if request is None:
            self._check_room(offer)
            return _Stored()
        ticket = request.tickets.get(offer.rank)
        free = request.free()
        sizes = {other.offer.num_ranks for other in free.values()}
        if sizes and offer.num_ranks not in sizes:
            raise refusals.ranks_disagree(offer, sizes.pop())
        if offer.rank not in free:
            self._check_room(offer)
        if ticket is None:
            return _Stored()
        return _Stored(ticket.revision, ticket.lease, b"" if ticket.expired else ticket.offer.ticket)

    def _check_room(self, offer: Offer) -> None:
        count = self._mirror.num_free_of(offer.worker_id)
        if count >= self._limits.tickets_per_worker:
            raise refusals.too_many_tickets(offer.worker_id, count)
        if self._mirror.num_free >= self._limits.tickets:
            raise refusals.too_many_tickets_in_all(self._limits.tickets)

    def _read(self, kv: pb.KeyValue, offer: Offer) -> _Stored:
        request = self._mirror.requests.get(offer.request_id)
        known = request.tickets.get(offer.rank) if request else None
        if known is not None and known.expired and known.revision == kv.mod_revision:
            return _Stored(kv.mod_revision, kv.lease)
        return _Stored(kv.mod_revision, kv.lease, StoredRecords.OFFER.decode(kv.value).ticket)

    def next_deadline(self) -> float:
        """Returns a time before which `collect` deletes nothing."""
        return self._garbage.next()

    def collect(self, now: float) -> None:
        """Expires tickets, and deletes expired keys a little later in the background."""
        for key in self._mirror.expire(now):
            self._garbage.set(key, now + random.uniform(0, _COLLECT_WITHIN_S))
        for_each("store timer", lambda key: self._delete(*key, now), self._garbage.due(now, MAX_DUE))

    def _delete(self, request_id: str, rank: int, now: float) -> None:
        request = self._mirror.requests.get(request_id)
        if request is None:
            return
        if rank == RECORD:
            key, revision = self._layout.claim_record(request_id), request.claimed_revision
        else:
            ticket = request.tickets.get(rank)
            if ticket is None or not ticket.expired:
                return
            key, revision = self._layout.ticket(request_id, rank), ticket.revision
        txn = pb.TxnRequest(compare=[unchanged(key, revision)], success=[delete(key)])

        def deleted(done: asyncio.Future[pb.TxnResponse]) -> None:
            if not done.cancelled() and done.exception() is not None:
                self._garbage.set((request_id, rank), now + 10 * _COLLECT_WITHIN_S)

        self._commits.submit(txn, key).add_done_callback(guarded("etcd deletions", deleted))
