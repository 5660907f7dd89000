# SPDX-License-Identifier: Apache-2.0
"""Which tickets wait for whom. Pure: takes the time as a value, returns which waiting claims are answered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import Refused
from kvlink.control.store import sentences
from kvlink.control.values import Claim, Offer


class Answer(NamedTuple):
    """A waiting claim has ended: with tickets, or refused."""

    waiter: int
    tickets: list[bytes]
    refused: Refused | None = None


@dataclass(slots=True)
class _Request:
    """Exists while a ticket or a waiter does."""

    ranks: dict[int, Offer] = field(default_factory=dict)
    tp_size: int = 0
    num_seats: int = 0
    """Of the ticket that has most."""
    served: set[int] = field(default_factory=set)
    claim_ids: set[bytes] = field(default_factory=set)
    waiters: dict[int, None] = field(default_factory=dict)
    """Served last come, first: an earlier claim of the same reader is most likely one that was given up."""


class _Claimed(NamedTuple):
    """A request whose every reader has claimed."""

    tickets: list[bytes]
    claim_ids: set[bytes]


class Offers:
    """Tickets by request and rank, waiting claims, and how requests ended (bounded)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: dict[str, _Request] = {}
        self._by_worker: dict[str, set[tuple[str, int]]] = {}
        self._tickets: Deadlines[tuple[str, int]] = Deadlines()
        self._waiting: dict[int, Claim] = {}
        self._patience: Deadlines[int] = Deadlines()
        self._ended: OrderedDict[str, Refused] = OrderedDict()
        self._claimed: OrderedDict[str, _Claimed] = OrderedDict()
        self._last_waiter = 0
        self._ticket_bytes = 0
        self.num_claimed = 0
        self.num_expired = 0

    @property
    def num_tickets(self) -> int:
        """Offered and neither fully claimed nor expired."""
        return len(self._tickets)

    @property
    def num_waiting(self) -> int:
        """Claims waiting for an offer."""
        return len(self._waiting)

    def offer(self, offer: Offer, now: float) -> list[Answer]:
        """Takes a ticket in, replacing the rank's last one. Raises Refused (MALFORMED, TOO_MANY)."""
        claimed = self._claimed.get(offer.request_id)
        if claimed is not None:
            if offer.ticket in claimed.tickets:
                return []
            del self._claimed[offer.request_id]
        request = self._requests.get(offer.request_id)
        if request is None:
            request = _Request()
        elif request.ranks and request.tp_size != offer.tp_size:
            raise sentences.ranks_disagree(offer, request.tp_size)
        key = (offer.request_id, offer.tp_rank)
        owned = self._by_worker.setdefault(offer.worker_id, set())
        if key not in owned and len(owned) >= self._limits.tickets_per_worker:
            raise sentences.too_many_tickets(offer.worker_id, len(owned))
        before = request.ranks.get(offer.tp_rank)
        ticket_bytes = self._ticket_bytes + len(offer.ticket) - (len(before.ticket) if before else 0)
        if ticket_bytes > self._limits.ticket_bytes:
            raise sentences.too_many_bytes(offer.worker_id, self._limits.ticket_bytes)
        self._ticket_bytes = ticket_bytes
        if before is not None and before.worker_id != offer.worker_id:
            self._disown(before.worker_id, key)
        self._requests[offer.request_id] = request
        request.tp_size = offer.tp_size
        request.num_seats = max(request.num_seats, offer.num_seats)
        request.ranks[offer.tp_rank] = offer
        owned.add(key)
        self._tickets.set(key, now + offer.ttl_s)
        if self._ended:
            self._ended.pop(offer.request_id, None)
        return self._serve_waiters(request) if request.waiters else []

    def take(self, claim: Claim) -> list[bytes] | None:
        """The tickets, if every rank has offered. Raises Refused when the request ended unclaimed."""
        claimed = self._claimed.get(claim.request_id) if claim.claim_id else None
        if claimed is not None and claim.claim_id in claimed.claim_ids:
            return claimed.tickets
        request = self._requests.get(claim.request_id)
        if request is None:
            ended = self._ended.get(claim.request_id)
            if ended is not None:
                raise Refused(ended.reason, ended.sentence)
            return None
        if not request.ranks or len(request.ranks) < request.tp_size:
            return None
        return self._serve(request, claim)

    def wait(self, claim: Claim, now: float) -> int:
        """Queues a claim that `take` could not answer. Raises Refused (TOO_MANY)."""
        if len(self._waiting) >= self._limits.waiting_claims:
            raise sentences.too_many_claims(len(self._waiting))
        request = self._requests.setdefault(claim.request_id, _Request())
        self._last_waiter += 1
        self._waiting[self._last_waiter] = claim
        self._patience.set(self._last_waiter, now + claim.timeout_s)
        request.waiters[self._last_waiter] = None
        return self._last_waiter

    def cancel(self, waiter: int) -> None:
        """The caller of a waiting claim is gone."""
        claim = self._waiting.pop(waiter, None)
        self._patience.discard(waiter)
        request = self._requests.get(claim.request_id) if claim else None
        if claim and request:
            request.waiters.pop(waiter, None)
            self._prune(claim.request_id, request)

    def drop_worker(self, worker_id: str, why: str) -> None:
        """Forgets what a worker offered. Claims keep waiting: its next life may offer the request again."""
        for request_id, rank in list(self._by_worker.get(worker_id, ())):
            self._drop(request_id, rank, sentences.gone_with_worker(request_id, why))

    def next_deadline(self) -> float:
        """`expire` has nothing to do before."""
        return min(self._tickets.next(), self._patience.next())

    def expire(self, now: float) -> list[Answer]:
        """Drops the tickets that ran out, then refuses the claims that waited long enough."""
        for request_id, rank in self._tickets.due(now):
            offer = self._requests[request_id].ranks[rank]
            self.num_expired += 1
            self._drop(request_id, rank, sentences.expired(offer))
        return [self._give_up(waiter) for waiter in self._patience.due(now)]

    def _serve(self, request: _Request, claim: Claim) -> list[bytes]:
        ranks = request.ranks
        tickets = [ranks[rank].ticket for rank in range(request.tp_size)]
        request.served.add(claim.reader)
        request.claim_ids.add(claim.claim_id)
        self.num_claimed += 1
        if len(request.served) >= max(claim.num_readers, request.num_seats):
            self._claimed[claim.request_id] = _Claimed(tickets, request.claim_ids)
            if len(self._claimed) > self._limits.remembered_requests:
                self._claimed.popitem(last=False)
            for offer in ranks.values():
                self._forget(offer)
            ranks.clear()
            self._prune(claim.request_id, request)
        return tickets

    def _serve_waiters(self, request: _Request) -> list[Answer]:
        answers = []
        while request.waiters and len(request.ranks) == request.tp_size:
            waiter, _ = request.waiters.popitem()
            self._patience.discard(waiter)
            answers.append(Answer(waiter, self._serve(request, self._waiting.pop(waiter))))
        return answers

    def _drop(self, request_id: str, rank: int, why: Refused) -> None:
        request = self._requests[request_id]
        self._forget(request.ranks.pop(rank))
        self._ended[request_id] = why
        if len(self._ended) > self._limits.remembered_requests:
            self._ended.popitem(last=False)
        self._prune(request_id, request)

    def _forget(self, offer: Offer) -> None:
        key = (offer.request_id, offer.tp_rank)
        self._ticket_bytes -= len(offer.ticket)
        self._tickets.discard(key)
        self._disown(offer.worker_id, key)

    def _prune(self, request_id: str, request: _Request) -> None:
        if not request.ranks:
            request.served.clear()
            request.claim_ids = set()
            request.num_seats = 0
            if not request.waiters:
                self._requests.pop(request_id, None)

    def _disown(self, worker_id: str, key: tuple[str, int]) -> None:
        owned = self._by_worker[worker_id]
        owned.discard(key)
        if not owned:
            del self._by_worker[worker_id]

    def _give_up(self, waiter: int) -> Answer:
        claim = self._waiting[waiter]
        request = self._requests[claim.request_id]
        self.cancel(waiter)
        return Answer(waiter, [], sentences.in_vain(claim, len(request.ranks), request.tp_size))
