# SPDX-License-Identifier: Apache-2.0
"""Matches tickets and claims. Pure: takes the time as a value and returns the waiting claims that are answered."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import RefusedError
from kvlink.control.values import Claim, Offer
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.waiting_claims import MAX_DUE, W, WaitingClaims

Answer = tuple[W, list[bytes], RefusedError | None]
"""Says that a waiting claim ended: (waiter, tickets, refusal or None). It is a tuple because there are many."""


@dataclass(slots=True)
class _Request:
    """Holds the tickets of one request. It exists while there are any."""

    ranks: dict[int, Offer] = field(default_factory=dict)
    num_ranks: int = 1
    num_seats: int = 1
    """The largest number of seats of any of its tickets."""
    served: set[int] = field(default_factory=set)
    claim_ids: set[bytes] = field(default_factory=set)
    lasts_until: float = 0.0
    """No ticket of the request lives longer than this."""
    tickets: list[bytes] = field(default_factory=list)
    """Those of all ranks in their order, once they have been claimed. Their number may be large."""


@dataclass(slots=True)
class _Claimed:
    """Holds a request that all of its readers have claimed."""

    offers: list[Offer]
    """The offers in rank order."""
    served: set[int]
    claim_ids: set[bytes]
    lasts_until: float

    @property
    def tickets(self) -> list[bytes]:
        return [offer.ticket for offer in self.offers]


class PendingOffers(Generic[W]):
    """Keeps tickets by request and rank, waiting claims, and a bounded number of ended requests.

    The caller identifies waiters by any hashable value.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._requests: dict[str, _Request] = {}
        self._by_worker: dict[str, set[tuple[str, int]]] = {}
        self._tickets: Deadlines[tuple[str, int]] = Deadlines()
        self._dropped: dict[tuple[str, int], str] = {}
        """Maps those keys in `_tickets` whose worker is gone to why. They end a few at a time, or when asked for."""
        self.waiting: WaitingClaims[W] = WaitingClaims(limits)
        """The claims that `take` could not answer."""
        self._ended: OrderedDict[str, _Claimed | RefusedError] = OrderedDict()
        self._claimed: OrderedDict[str, int] = OrderedDict()
        """Maps those requests in `_ended` that hold tickets to the bytes of their tickets."""
        self._claimed_until: Deadlines[str] = Deadlines()
        self._ticket_bytes = 0
        self._claimed_bytes = 0
        self.num_claimed = 0
        self.num_expired = 0

    @property
    def num_tickets(self) -> int:
        """Offered and neither fully claimed nor expired."""
        return len(self._tickets) - len(self._dropped)

    def offer(self, offer: Offer, now: float) -> list[Answer[W]]:
        """Stores a ticket, replacing the rank's last one. Raises RefusedError (MALFORMED, TOO_MANY)."""
        request_id, worker_id, _, ttl_s, rank, num_ranks, num_seats, ticket = offer
        self._end_dropped(request_id)
        ended = self._ended.get(request_id)
        if isinstance(ended, _Claimed) and ticket in ended.tickets:
            return []
        request = self._requests.get(request_id)
        if request is None:
            request = _Request()
        elif request.ranks and request.num_ranks != num_ranks:
            raise refusals.ranks_disagree(offer, request.num_ranks)
        key = request_id, rank
        owned = self._by_worker.get(worker_id) or set()
        if len(owned) >= self._limits.tickets_per_worker and key not in owned:
            raise refusals.too_many_tickets(worker_id, len(owned))
        before = request.ranks.get(rank)
        if before is None and len(self._tickets) >= self._limits.tickets:
            raise refusals.too_many_tickets_in_all(self._limits.tickets)
        ticket_bytes = self._ticket_bytes + len(ticket) - (len(before.ticket) if before else 0)
        if ticket_bytes > self._limits.ticket_bytes:
            raise refusals.too_many_bytes(worker_id, self._limits.ticket_bytes)
        self._ticket_bytes = ticket_bytes
        if before is not None and before.worker_id != worker_id:
            self._forget_owner(before.worker_id, key)
        if ended is not None:
            self._remember_no_more(request_id)
        self._make_room()
        request.lasts_until = max(request.lasts_until, now + ttl_s)
        request.num_ranks = num_ranks
        request.num_seats = max(request.num_seats, num_seats)
        request.ranks[rank] = offer
        request.tickets = []
        answers = self._serve_waiters(request_id, request)
        if request.ranks:  # a waiter did not take the tickets at once
            owned.add(key)
            self._requests[request_id] = request
            self._by_worker[worker_id] = owned
            self._tickets.set(key, now + ttl_s)
        return answers

    def take(self, claim: Claim) -> list[bytes] | None:
        """Returns the tickets if every rank has offered, else None. Raises RefusedError if it ended unclaimed."""
        self._end_dropped(claim.request_id)
        request = self._requests.get(claim.request_id)
        if request is not None and len(request.ranks) == request.num_ranks:
            return self._serve(request, claim)
        ended = self._ended.get(claim.request_id)
        if isinstance(ended, _Claimed):
            return ended.tickets if claim.claim_id and claim.claim_id in ended.claim_ids else None
        if ended is not None and request is None and not self.waiting.of(claim.request_id):
            raise RefusedError(ended.reason, ended.sentence)
        return None

    def release(
        self, claim: Claim, now: float, runs: Callable[[str, int], bool] = lambda worker_id, epoch: True
    ) -> list[Answer[W]]:
        """Makes the tickets of an answered claim available again, because its reader did not take them.

        Tickets of workers that no longer run under their epoch stay claimed.
        """
        name = claim.request_id
        self._end_dropped(name)
        ended = self._ended.get(name)
        given = ended if isinstance(ended, _Claimed) else self._requests.get(name)
        if given is None or claim.reader not in given.served or claim.claim_id not in given.claim_ids:
            return []
        given.served.discard(claim.reader)
        if claim.claim_id:
            given.claim_ids.discard(claim.claim_id)
        if not isinstance(given, _Claimed) or not all(
            runs(each.worker_id, each.epoch) for each in given.offers
        ):
            return []
        self._remember_no_more(name)
        request = self._requests.setdefault(name, _Request())
        request.served, request.claim_ids = given.served, given.claim_ids
        answers: list[Answer[W]] = []
        try:
            for offer in given.offers:
                answers += self.offer(offer._replace(ttl_s=given.lasts_until - now), now)
        except RefusedError:  # there is no longer room for them
            self._prune(name, request)
        return answers

    def drop_worker(self, worker_id: str, why: str) -> None:
        """Drops what a worker offered. Claims keep waiting, because its next process may offer the request again."""
        self._dropped.update(dict.fromkeys(self._by_worker.pop(worker_id, ()), why))

    def _drop_some(self) -> None:
        for request_id, rank in list(islice(self._dropped, MAX_DUE)):
            self._drop(
                request_id, rank, refusals.gone_with_worker(request_id, self._dropped[request_id, rank])
            )

    def _end_dropped(self, request_id: str) -> None:
        """Ends the tickets of a request whose worker is gone."""
        if not self._dropped or (request := self._requests.get(request_id)) is None:
            return
        for rank in [rank for rank in request.ranks if (request_id, rank) in self._dropped]:
            self._drop(
                request_id, rank, refusals.gone_with_worker(request_id, self._dropped[request_id, rank])
            )

    def next_deadline(self) -> float:
        """Returns a time before which `expire` has nothing to do."""
        if self._dropped:
            return -math.inf
        return min(self._tickets.next(), self.waiting.next_deadline(), self._claimed_until.next())

    def expire(self, now: float) -> list[Answer[W]]:
        """Drops expired tickets, claimed ones too, and then refuses the claims that timed out.

        It does so much at a time as `MAX_DUE`. `next_deadline` says whether there is more.
        """
        self._drop_some()
        for request_id in self._claimed_until.due(now, MAX_DUE):
            self._remember_no_more(request_id)
        for request_id, rank in self._tickets.due(now, MAX_DUE):
            offer = self._requests[request_id].ranks[rank]
            self.num_expired += 1
            self._drop(request_id, rank, refusals.expired(offer))
        assert self.num_tickets >= 0
        return [self._give_up(waiter) for waiter in self.waiting.due(now)]

    def _serve(self, request: _Request, claim: Claim) -> list[bytes]:
        request_id, _, reader, num_readers, claim_id = claim
        ranks = request.ranks
        if not request.tickets:
            request.tickets = [ranks[rank].ticket for rank in range(request.num_ranks)]
        tickets = request.tickets
        assert len(ranks) == request.num_ranks == len(tickets)
        request.served.add(reader)
        request.claim_ids.add(claim_id)
        self.num_claimed += 1
        if num_readers <= len(request.served) >= request.num_seats:
            num_bytes = sum(map(len, tickets))
            offers = [ranks[rank] for rank in range(request.num_ranks)]
            claimed = _Claimed(offers, request.served, request.claim_ids, request.lasts_until)
            self._end(request_id, claimed)
            self._claimed[request_id] = num_bytes
            self._claimed_bytes += num_bytes
            self._claimed_until.set(request_id, request.lasts_until)
            self._forget(ranks.values())
            self._make_room()
            ranks.clear()
            self._prune(request_id, request)
        return tickets

    def _serve_waiters(self, request_id: str, request: _Request) -> list[Answer[W]]:
        answers: list[Answer[W]] = []
        for waiter in self.waiting.of(request_id) if len(request.ranks) == request.num_ranks else ():
            claim = self.waiting.remove(waiter) if len(request.ranks) == request.num_ranks else None
            if claim is None:
                break
            answers.append((waiter, self._serve(request, claim), None))
        return answers

    def _drop(self, request_id: str, rank: int, why: RefusedError) -> None:
        request = self._requests[request_id]
        request.tickets = []
        self._forget([request.ranks.pop(rank)])
        self._end(request_id, why)
        self._prune(request_id, request)

    def _end(self, request_id: str, how: _Claimed | RefusedError) -> None:
        self._remember_no_more(request_id)
        self._ended[request_id] = how
        if len(self._ended) > self._limits.remembered_requests:
            self._remember_no_more(next(iter(self._ended)))

    def _remember_no_more(self, request_id: str) -> None:
        if isinstance(self._ended.pop(request_id, None), _Claimed):
            self._claimed_bytes -= self._claimed.pop(request_id)
            self._claimed_until.discard(request_id)
            assert self._claimed_bytes >= 0

    def _make_room(self) -> None:
        """Drops the oldest claimed tickets, kept for repeated claims, if unclaimed tickets need their room."""
        most = min(self._limits.ticket_bytes // 4, self._limits.ticket_bytes - self._ticket_bytes)
        while self._claimed_bytes > most:
            self._remember_no_more(next(iter(self._claimed)))

    def _forget(self, offers: Iterable[Offer]) -> None:
        for request_id, worker_id, _, _, rank, _, _, ticket in offers:
            self._ticket_bytes -= len(ticket)
            self._tickets.discard((request_id, rank))
            self._dropped.pop((request_id, rank), None)
            self._forget_owner(worker_id, (request_id, rank))
        assert self._ticket_bytes >= 0

    def _prune(self, request_id: str, request: _Request) -> None:
        if not request.ranks:
            self._requests.pop(request_id, None)

    def _forget_owner(self, worker_id: str, key: tuple[str, int]) -> None:
        owned = self._by_worker.get(worker_id)
        if owned is not None:
            owned.discard(key)
            if not owned:
                del self._by_worker[worker_id]

    def _give_up(self, waiter: W) -> Answer[W]:
        claim = self.waiting.remove(waiter)
        assert claim is not None  # a waiter that is removed is never due
        request = self._requests.get(claim.request_id, _NO_OFFER)
        return waiter, [], refusals.claim_timed_out(claim, len(request.ranks), request.num_ranks)


_NO_OFFER = _Request()
