# SPDX-License-Identifier: Apache-2.0
"""The pure parts of the store on etcd: keys, who may have a request's tickets, and the mirror against a listing."""

from __future__ import annotations

import random

import pytest
from control.cards import make_card, make_offer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlink.control.codec import StoredRecords
from kvlink.control.limits import Limits
from kvlink.control.values import Claim, Claimed, Incarnation
from kvlink.coordinator.store.etcd import keys
from kvlink.coordinator.store.etcd.api import after, split_url
from kvlink.coordinator.store.etcd.keys import Key, Keys
from kvlink.coordinator.store.etcd.mirror import Mirror
from kvlink.coordinator.store.etcd.requests import Request, Ticket, serve
from kvlink.errors import ConfigError
from kvlink.v1 import etcd_pb2 as pb

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
