# SPDX-License-Identifier: Apache-2.0
"""Offers and claims that wait, and the mirror of etcd."""

from __future__ import annotations

import math
import random

import pytest
from control.cards import make_card, make_offer
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvlink.control.codec import StoredRecords
from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.values import Claim, Claimed, Incarnation, Offer
from kvlink.coordinator.store.etcd import keys
from kvlink.coordinator.store.etcd.api import after, split_url
from kvlink.coordinator.store.etcd.keys import Key, Keys
from kvlink.coordinator.store.etcd.mirror import Mirror
from kvlink.coordinator.store.etcd.requests import Request, Ticket, serve
from kvlink.coordinator.store.pending_offers import PendingOffers
from kvlink.errors import ConfigError
from kvlink.v1 import etcd_pb2 as pb

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
        except RefusedError:
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
    offer(1, b"b")  # its owner did not receive the answer
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
    with pytest.raises(RefusedError, match="not claimed within"):
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
        assert offers.release(other, 1.0) == []
        assert offers.take(claim._replace(claim_id=b"another")) is None
        assert offers.take(claim) == [bytes(100)]
    assert offers.release(claim, 1.0) == []
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


NAMES = st.text(min_size=1, max_size=20)


@given(NAMES, st.integers(0, 1023), st.text(max_size=10), st.text(max_size=10))
def test_keys_come_apart_again(name: str, rank: int, fleet: str, tenant: str) -> None:
    layout = Keys(fleet, tenant)
    assert layout.parse(layout.worker(name)) == Key(keys.WORKERS, name)
    assert layout.parse(layout.epoch(name)) == Key(keys.EPOCHS, name)
    assert layout.parse(layout.claim_record(name)) == Key(keys.CLAIMS, name)
    assert layout.parse(layout.ticket(name, rank)) == Key(keys.TICKETS, name, str(rank))
    assert layout.parse(layout.settle_order(name, "id")) == Key(keys.SETTLES, name, "id")
    assert layout.tickets(name) <= layout.ticket(name, rank) < after(layout.tickets(name))
    assert layout.parse(layout.pulse) is None


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_fleets_and_tenants_do_not_overlap(fleet: str, tenant: str, other: str, another: str) -> None:
    if (fleet, tenant) != (other, another):
        one, two = Keys(fleet, tenant).prefix, Keys(other, another).prefix
        assert not one.startswith(two)
        assert not two.startswith(one)


@pytest.mark.parametrize("url", ["", "memory:", "etcd:a:1", "etcd://", "redis://a:1", "etcd://a:1/b/c"])
def test_what_names_no_store(url: str) -> None:
    with pytest.raises(ConfigError, match="does not name a store"):
        split_url(url)


def test_what_names_one() -> None:
    assert split_url("etcd://a:1,b:2") == ("a:1,b:2", "default")
    assert split_url("etcd://a:1/fleet") == ("a:1", "fleet")


def request(*tickets: Ticket, claimed: Claimed | None = None) -> Request:
    return Request({ticket.offer.rank: ticket for ticket in tickets}, claimed, 9 if claimed else 0)


def ticket(revision: int, rank: int = 0, of: int = 1, seats: int = 1, expired: bool = False) -> Ticket:
    return Ticket(make_offer("r", "w", rank=rank, of=of, seats=seats), revision, 1, expired)


def digests(*tickets: Ticket) -> tuple[bytes, ...]:
    return tuple(ticket.digest for ticket in tickets)


def test_nothing_is_served_until_every_rank_is_there() -> None:
    assert serve(request(), Claim("r")) is None
    assert serve(request(ticket(1, 0, 2)), Claim("r")) is None
    both = serve(request(ticket(5, 1, 2), ticket(1, 0, 2)), Claim("r", 0, 0, 1, b"id"))
    assert both is not None
    assert [of.revision for of in both.tickets] == [1, 5]
    assert both.record == Claimed(digests(*both.tickets), ((0, b"id"),), True, 30.0)


def test_who_had_it_may_ask_again_and_nobody_else() -> None:
    claimed = request(ticket(1), claimed=Claimed(digests(ticket(1)), ((0, b"id"),), True, 30.0))
    again = serve(claimed, Claim("r", 0, 0, 1, b"id"))
    assert again is not None
    assert again.record is None
    for other in (Claim("r"), Claim("r", 0, 0, 1, b"other"), Claim("r", 0, 1, 2, b"id")):
        assert serve(claimed, other) is None


def test_readers_are_counted_up_to_the_seats() -> None:
    known = Claimed(digests(ticket(1)), ((0, b"a"),), False, 30.0)
    second = serve(request(ticket(1, seats=2), claimed=known), Claim("r", 0, 1, 2, b"b"))
    assert second is not None
    assert second.record == Claimed(known.tickets, ((0, b"a"), (1, b"b")), True, 30.0)
    assert second.before == 9, "the record that was seen must be there still when this one is written"


def test_a_record_is_about_its_own_tickets_alone() -> None:
    old = [ticket(1, rank, 2) for rank in range(2)]
    new = [Ticket(of.offer._replace(ticket=b"new " + of.offer.ticket), 2, 1) for of in old]
    known = Claimed(digests(*old), ((0, b"a"),), True, 30.0)
    again = [Ticket(of.offer, 3, 2) for of in old]  # offered again after the worker's lease was lost
    for pair in (again, [new[0], old[1]]):
        assert serve(request(*pair, claimed=known), Claim("r")) is None
    again = serve(request(*new, claimed=known), Claim("r"))
    assert again is not None
    assert again.record == Claimed(digests(*new), ((0, b""),), True, 30.0)


def test_what_expired_is_not_served() -> None:
    assert serve(request(ticket(1, expired=True)), Claim("r")) is None


LAYOUT = Keys("fleet")


class History:
    """Random changes as etcd would tell them, and what a listing shows in the end."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.listing: dict[bytes, pb.KeyValue] = {}
        self.revision = 1

    def step(self) -> list[pb.Event]:
        self.revision += 1
        key = self._random.choice(
            [LAYOUT.worker("w"), LAYOUT.epoch("w"), LAYOUT.claim_record("r")]
            + [LAYOUT.ticket(name, rank) for name in "rs" for rank in range(2)]
        )
        if key in self.listing and self._random.random() < 0.4:
            del self.listing[key]
            return [pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key, mod_revision=self.revision))]
        kv = pb.KeyValue(key=key, value=self._value(key), lease=7, mod_revision=self.revision)
        self.listing[key] = kv
        return [pb.Event(kv=kv)]

    def _value(self, key: bytes) -> bytes:
        parsed = LAYOUT.parse(key)
        assert parsed is not None
        if parsed.kind == keys.WORKERS:
            return StoredRecords.CARD.encode(make_card("w", epoch=self._random.randint(1, 3)))
        if parsed.kind == keys.EPOCHS:
            return StoredRecords.INCARNATION.encode(Incarnation(1, bytes(16), self._random.random() < 0.5))
        if parsed.kind == keys.TICKETS:
            return StoredRecords.OFFER.encode(make_offer(parsed.name, "w", rank=int(parsed.part), of=2))
        known = digests(*(ticket(1, rank, 2) for rank in range(self._random.randint(0, 2))))
        return StoredRecords.CLAIMED.encode(Claimed(known, ((0, b"x"),), self._random.random() < 0.7, 30.0))


def state(mirror: Mirror) -> object:
    free = {name: sorted(request.free()) for name, request in mirror.requests.items() if request.free()}
    return (
        mirror.members,
        mirror.incarnations,
        free,
        mirror.num_free,
        mirror.num_free_of("w"),
        len(mirror.due),
    )


@given(st.integers(0, 10**9), st.integers(0, 40), st.integers(0, 40))
@settings(max_examples=150)
def test_following_and_listing_come_to_the_same(seed: int, before: int, missed: int) -> None:
    history = History(seed)
    follower, latecomer, absent = (Mirror(LAYOUT, Limits()) for _ in range(3))
    for number in range(before + missed):
        events = history.step()
        follower.apply(events, 0.0)
        if number < before:
            absent.apply(events, 0.0)
    latecomer.replace_all(list(history.listing.values()), 0.0)
    absent.replace_all(list(history.listing.values()), 0.0)
    assert state(follower) == state(latecomer) == state(absent)


@given(st.sampled_from([keys.WORKERS, keys.EPOCHS, keys.TICKETS, keys.CLAIMS, keys.SETTLES]), st.binary())
def test_what_no_coordinator_wrote_is_passed_over(kind: bytes, noise: bytes) -> None:
    mirror = Mirror(LAYOUT, Limits())
    for key in (LAYOUT.prefix + kind + b"/" + noise, LAYOUT.prefix + noise):
        mirror.apply([pb.Event(kv=pb.KeyValue(key=key, value=noise, mod_revision=2))], 0.0)
    assert mirror.members == {}
    assert mirror.num_free == 0


def test_what_ended_is_not_counted_as_free_and_says_why() -> None:
    mirror = Mirror(LAYOUT, Limits())
    card = pb.KeyValue(
        key=LAYOUT.worker("w"), value=StoredRecords.CARD.encode(make_card("w")), lease=7, mod_revision=1
    )
    mirror.apply([pb.Event(kv=card)], 0.0)
    for number, name in enumerate(("short", "long"), 2):
        offer = make_offer(name, "w", ttl_s=10.0 * number)
        kv = pb.KeyValue(
            key=LAYOUT.ticket(name, 0), value=StoredRecords.OFFER.encode(offer), lease=7, mod_revision=number
        )
        mirror.apply([pb.Event(kv=kv)], 0.0)
    assert (mirror.num_free, mirror.num_free_of("w")) == (2, 2)
    assert mirror.expire(19.9) == []
    assert mirror.expire(20.0) == [("short", 0)]
    assert (mirror.num_free, mirror.num_free_of("w"), mirror.num_expired) == (1, 1, 1)
    assert serve(mirror.requests["short"], Claim("short")) is None, "etcd has yet to delete it"
    why = mirror.why_ended("short")
    assert why is not None
    assert "not claimed within" in why.sentence
    for left in (False, True):
        incarnation = StoredRecords.INCARNATION.encode(Incarnation(1, bytes(16), left))
        mirror.apply([_put(LAYOUT.epoch("w"), incarnation, 9)], 1.0)
        gone = [pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=LAYOUT.worker("w")))]
        mirror.apply(
            [*gone, pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=LAYOUT.ticket("long", 0)))], 1.0
        )
        why = mirror.why_ended("long")
        assert why is not None
        assert ("left" if left else "stopped beating") in why.sentence
        assert (mirror.num_free, mirror.num_lost) == (0, 1)
        mirror.apply([pb.Event(kv=card)], 1.0)
        mirror.apply([pb.Event(kv=kv)], 1.0)


def _put(key: bytes, value: bytes, revision: int) -> pb.Event:
    return pb.Event(kv=pb.KeyValue(key=key, value=value, mod_revision=revision))


@pytest.mark.parametrize("offered_again_at", [2.5, 15.5, 20.5, 29.5])
def test_a_record_outlives_a_ticket_that_is_offered_again_late(offered_again_at: float) -> None:
    """The ticket's last 20 s begin again with its second write, which was slow. Nobody else gets it."""
    layout = Keys("fleet", "")
    mirror = Mirror(layout, Limits())
    offer = make_offer("r", ttl_s=20.0)
    key, record = layout.ticket("r", 0), layout.claim_record("r")
    mirror.apply([_put(key, StoredRecords.OFFER.encode(offer), 1)], 0.0)
    claimed = serve(mirror.requests["r"], Claim("r", claim_id=b"first"))
    assert claimed is not None
    assert claimed.record is not None
    mirror.apply([_put(record, StoredRecords.CLAIMED.encode(claimed.record), 2)], 0.5)
    mirror.apply([pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=key))], 1.0)
    ended: list[tuple[str, int]] = []
    for now in range(1, 100):
        if now > offered_again_at > now - 1:
            mirror.apply([_put(key, StoredRecords.OFFER.encode(offer), 3)], offered_again_at)
        for name, rank in mirror.expire(float(now)):
            ended.append((name, rank))
            what = record if rank < 0 else key
            mirror.apply([pb.Event(type=pb.Event.DELETE, kv=pb.KeyValue(key=what))], float(now))
        request = mirror.requests.get("r")
        assert request is None or serve(request, Claim("r", claim_id=b"rival")) is None, now
    assert ended == [("r", 0), ("r", -1)]
    assert not mirror.requests
    assert len(mirror.due) == 0
