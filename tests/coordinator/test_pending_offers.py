# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the coordinator against obvious models."""

from __future__ import annotations

import math

import pytest
from control.cards import make_offer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import Reason, Refused
from kvlink.control.values import Claim, Offer
from kvlink.coordinator.store.pending_offers import PendingOffers

KEYS = st.sampled_from("abcdef")


@given(
    st.lists(st.tuples(st.sampled_from(["set", "discard", "due"]), KEYS, st.integers(0, 20)), max_size=200)
)
def test_deadlines_agree_with_a_dictionary(steps: list[tuple[str, str, int]]) -> None:
    deadlines: Deadlines[str] = Deadlines()
    model: dict[str, int] = {}
    for what, key, time in steps:
        if what == "set":
            deadlines.set(key, time)
            model[key] = time
        elif what == "discard":
            deadlines.discard(key)
            model.pop(key, None)
        else:
            due = deadlines.due(time)
            assert sorted(due) == sorted(key for key, at in model.items() if at <= time)
            times = [model.pop(key) for key in due]
            assert times == sorted(times)
        assert len(deadlines) == len(model)
        assert deadlines.next() <= min(model.values(), default=math.inf)


def test_deadlines_that_are_always_moved_do_not_pile_up() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for step in range(10_000):
        deadlines.set(step % 10, float(step))
        assert deadlines.next() <= step
    assert len(deadlines._heap) < 200


class OffersAgainstModel(RuleBasedStateMachine):
    """One reader a request, so that a request is either complete, incomplete or gone."""

    def __init__(self) -> None:
        super().__init__()
        self.offers: PendingOffers[int] = PendingOffers(Limits(remembered_requests=2))
        self.now = 0.0
        self.num_offered = self.num_claims = 0
        self.tickets: dict[str, dict[int, tuple[Offer, float]]] = {}
        self.waiting: dict[int, tuple[Claim, float]] = {}

    requests = st.sampled_from(["x", "y", "z"])
    workers = st.sampled_from(["p", "q"])

    def complete(self, request_id: str) -> bool:
        return len(self.tickets.get(request_id, {})) == 2

    def drop(self, request_id: str, rank: int) -> None:
        del self.tickets[request_id][rank]
        if not self.tickets[request_id]:
            del self.tickets[request_id]

    def expected(self, request_id: str) -> list[bytes]:
        return [offer.ticket for _, (offer, _) in sorted(self.tickets.pop(request_id).items())]

    @rule(request_id=requests, worker=workers, rank=st.integers(0, 1), ttl_s=st.integers(1, 9))
    def offer(self, request_id: str, worker: str, rank: int, ttl_s: int) -> None:
        self.num_offered += 1
        offer = make_offer(request_id, worker, ttl_s=float(ttl_s), rank=rank, of=2)
        offer = offer._replace(ticket=b"%d" % self.num_offered)
        self.tickets.setdefault(request_id, {})[rank] = (offer, self.now + ttl_s)
        answers = self.offers.offer(offer, self.now)
        wanted = [waiter for waiter, (claim, _) in self.waiting.items() if claim.request_id == request_id]
        if self.complete(request_id) and wanted:
            assert answers == [(max(wanted), self.expected(request_id), None)]
            del self.waiting[max(wanted)]
        else:
            assert answers == []

    @rule(request_id=requests, timeout_s=st.integers(1, 9))
    def claim(self, request_id: str, timeout_s: int) -> None:
        claim = Claim(request_id, float(timeout_s))
        try:
            tickets = self.offers.take(claim)
        except Refused:
            assert request_id not in self.tickets, "only what ended unclaimed is refused"
            return
        if self.complete(request_id):
            assert tickets == self.expected(request_id)
        else:
            assert tickets is None
            self.num_claims += 1
            self.offers.waiting.add(claim, self.num_claims, self.now + timeout_s)
            self.waiting[self.num_claims] = (claim, self.now + timeout_s)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.waiting:
            waiter = data.draw(st.sampled_from(sorted(self.waiting)))
            assert self.offers.waiting.remove(waiter) == self.waiting[waiter][0]
            assert self.offers.waiting.remove(waiter) is None
            del self.waiting[waiter]

    @rule(worker=workers)
    def worker_dies(self, worker: str) -> None:
        self.offers.drop_worker(worker, "it died")
        for request_id, ranks in list(self.tickets.items()):
            for rank, (offer, _) in list(ranks.items()):
                if offer.worker_id == worker:
                    self.drop(request_id, rank)

    @rule(seconds=st.integers(1, 5))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        for request_id, ranks in list(self.tickets.items()):
            for rank, (_, due) in list(ranks.items()):
                if due <= self.now:
                    self.drop(request_id, rank)
        answers = self.offers.expire(self.now)
        late = {waiter for waiter, (_, due) in self.waiting.items() if due <= self.now}
        assert {waiter for waiter, _, _ in answers} == late
        assert all(refused and refused.reason is Reason.UNKNOWN for _, _, refused in answers)
        for waiter in late:
            del self.waiting[waiter]

    @invariant()
    def counts_agree(self) -> None:
        assert self.offers.num_tickets == sum(map(len, self.tickets.values()))
        assert self.offers.waiting.all() == list(self.waiting)

    @invariant()
    def nothing_is_left_behind(self) -> None:
        wanted = {claim.request_id for claim, _ in self.waiting.values()}
        assert set(self.offers.waiting._by_request) == wanted
        dropped = self.offers._dropped
        requests = self.offers._requests.items()
        live = {name for name, each in requests if any((name, rank) not in dropped for rank in each.ranks)}
        assert live == set(self.tickets)
        assert set(self.offers._by_worker) == {
            offer.worker_id for ranks in self.tickets.values() for offer, _ in ranks.values()
        }
        assert len(self.offers._ended) <= 2

    @invariant()
    def the_next_deadline_is_never_late(self) -> None:
        dues = [due for ranks in self.tickets.values() for _, due in ranks.values()]
        assert self.offers.next_deadline() <= min(
            dues + [due for _, due in self.waiting.values()], default=math.inf
        )


TestOffers = OffersAgainstModel.TestCase
TestOffers.settings = settings(max_examples=150, stateful_step_count=40)


def test_a_ticket_for_one_answers_one_waiter() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    for waiter in (1, 2):
        offers.waiting.add(Claim("r", 5.0), waiter, 5.0)
    ((served, tickets, refused),) = offers.offer(make_offer("r"), 0.0)
    assert (tickets, refused) == ([make_offer("r").ticket], None)
    assert offers.waiting.all() == [3 - served]


def test_what_is_offered_again_is_what_a_claim_gets() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    claim = Claim("r", claim_id=b"id")

    def offer(rank: int, ticket: bytes) -> None:
        assert offers.offer(make_offer("r", rank=rank, of=2)._replace(ticket=ticket), 0.0) == []

    offer(0, b"a")
    assert offers.take(claim) is None, "one rank of two"
    offer(1, b"b")
    assert offers.take(claim) == [b"a", b"b"]
    offer(1, b"b")  # its owner did not hear the answer
    assert offers.take(claim) == [b"a", b"b"]
    assert offers.num_tickets == 0
    offer(0, b"c")
    assert offers.take(claim) is None, "the tickets before are those of a lease that has ended"
    offer(1, b"d")
    assert offers.take(claim) == [b"c", b"d"]


def test_an_expired_request_is_refused_until_it_is_offered_again() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    offers.offer(make_offer("r", ttl_s=5.0), 0.0)
    assert offers.expire(5.0) == []
    assert (offers.num_tickets, offers.num_expired, offers._requests) == (0, 1, {})
    with pytest.raises(Refused, match="not claimed within"):
        offers.take(Claim("r"))
    offers.offer(make_offer("r", ttl_s=5.0), 6.0)
    assert offers.take(Claim("r")) == [make_offer("r").ticket]


# Tickets that were claimed are kept for claims that are sent again: for a while, and for so many bytes.


def claimed(
    offers: PendingOffers[int], request_id: str, num_bytes: int, ttl_s: float = 5.0, now: float = 0.0
) -> Claim:
    offers.offer(make_offer(request_id, ttl_s=ttl_s)._replace(ticket=bytes(num_bytes)), now)
    claim = Claim(request_id, claim_id=request_id.encode())
    assert offers.take(claim) == [bytes(num_bytes)]
    return claim


def test_claimed_tickets_last_as_long_as_the_ticket_would() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    claim = claimed(offers, "r", 100, ttl_s=5.0, now=1.0)
    assert offers.next_deadline() <= 6.0
    offers.expire(5.9)
    assert offers.take(claim) == [bytes(100)]
    offers.expire(6.0)
    assert offers.take(claim) is None
    assert (offers._ended, offers._claimed, offers._claimed_bytes) == ({}, {}, 0)
    assert offers.next_deadline() == math.inf


def test_only_the_claim_that_was_answered_gives_its_tickets_back() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    claim = claimed(offers, "r", 100)
    for other in (
        claim._replace(claim_id=b"another"),
        claim._replace(reader=1),
        claim._replace(request_id="s"),
    ):
        assert offers.give_back(other, 1.0) == []
        assert offers.take(claim._replace(claim_id=b"another")) is None
        assert offers.take(claim) == [bytes(100)]
    assert offers.give_back(claim, 1.0) == []
    assert offers.take(claim._replace(claim_id=b"another")) == [bytes(100)]


def test_claimed_tickets_have_a_quarter_of_the_bytes() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits(ticket_bytes=1_000))
    claims = [claimed(offers, f"r{number}", 100) for number in range(6)]
    assert [offers.take(claim) is not None for claim in claims] == [False] * 4 + [True] * 2
    assert offers._claimed_bytes == 200


def test_claimed_tickets_give_way_to_those_that_nobody_has_yet() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits(ticket_bytes=1_000))
    claim = claimed(offers, "r", 200)
    offers.offer(make_offer("s")._replace(ticket=bytes(800)), 0.0)
    assert offers.take(claim) == [bytes(200)]
    offers.offer(make_offer("t")._replace(ticket=bytes(1)), 0.0)
    assert offers.take(claim) is None
    assert offers._ticket_bytes + offers._claimed_bytes == 801


def test_bytes_of_requests_that_are_offered_again_are_not_counted_twice() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    for turn in range(3):
        claimed(offers, "r", 100 + turn)
        assert (offers._claimed_bytes, offers._ticket_bytes, len(offers._claimed_until)) == (100 + turn, 0, 1)


def test_six_thousand_claims_of_128_kib_stay_within_the_bytes() -> None:
    offers: PendingOffers[int] = PendingOffers(Limits())
    ticket = bytes(128 << 10)
    for number in range(6_000):
        offers.offer(make_offer(f"r{number}", ttl_s=5.0)._replace(ticket=ticket), 0.0)
        assert offers.take(Claim(f"r{number}", claim_id=b"c")) is not None
    assert offers._claimed_bytes <= Limits().ticket_bytes // 4
    while offers.next_deadline() <= 5.0:
        offers.expire(5.0)
    assert (len(offers._ended), offers._claimed_bytes) == (0, 0)
