# SPDX-License-Identifier: Apache-2.0
"""A reader that comes too late is told why, and an owner that goes on writing for an ended offer is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
from transports.pools import wide

from kvlink import LeaseEnd, Ticket, Worker
from kvlink.errors import ConfigError, StaleBlocks, StaleReason, UnknownRequest
from kvlink.ticket import LeaseSeat

NewReader = Callable[..., Worker]


@pytest.fixture
def pair(transport: str, new_reader: NewReader) -> Iterator[list[Worker]]:
    """An owner of three slots and a reader, who take tickets that a test has changed."""
    options = {"transports": transport, "lease_slots": 3, "ticket_keys": "none"}
    workers = [new_reader(wide(8), **options) for _ in range(2)]
    yield workers
    workers.clear()  # pytest keeps what a fixture gave until after the leak check


def ended(owner: Worker) -> LeaseEnd:
    while True:
        for event in owner.events():
            return event.how


def why_stale(reader: Worker, ticket: Ticket) -> StaleReason:
    try:
        reader.pull(ticket, into=[3]).wait(20)
    except StaleBlocks as stale:
        return stale.why
    raise AssertionError("it was not stale")


def test_a_late_reader_is_told_how_the_lease_ended(pair: list[Worker]) -> None:
    owner, reader = pair
    settled = owner.offer("settled", [1])
    reader.pull(settled, into=[3]).wait(20)
    assert ended(owner) is LeaseEnd.SETTLED
    expired = owner.offer("expired", [1], ttl_s=1e-9)
    assert ended(owner) is LeaseEnd.EXPIRED
    aborted = owner.offer("aborted", [1])
    owner.abort("aborted")
    assert why_stale(reader, settled) is StaleReason.SETTLED
    assert why_stale(reader, expired) is StaleReason.EXPIRED
    assert why_stale(reader, aborted) is StaleReason.ABORTED
    owner.offer("another", [1])
    assert why_stale(reader, settled) is StaleReason.REUSED


def test_a_lease_that_was_never_granted_says_so(pair: list[Worker]) -> None:
    owner, reader = pair
    first = owner.offer("first", [1])
    early = dataclasses.replace(first, seats=(LeaseSeat(3, 1 << 40, 1 << 41),))
    assert why_stale(reader, early) is StaleReason.NEVER_GRANTED


def test_a_made_up_seat_is_refused_and_nothing_lands(pair: list[Worker]) -> None:
    owner, reader = pair
    owner.pool.numpy()[:] = 0xEE
    ticket = owner.offer("r", [1])
    reader.pool.numpy()[:] = 0
    header = LeaseSeat(0, int.from_bytes(b"KVLease2", "little"), 0)
    for seat in header, LeaseSeat(2, 0, 0), LeaseSeat(2, 0, 1 << 40), LeaseSeat(2, 255, 1 << 40):
        forged = dataclasses.replace(ticket)
        object.__setattr__(forged, "seats", (seat,))  # the core refuses it by itself
        with pytest.raises(ConfigError, match="the ticket is forged"):
            reader.pull(forged, into=[3]).wait(20)
        with pytest.raises(ConfigError, match="forged"):
            reader.pull(forged.to_text(), into=[3])
    assert not reader.pool.numpy().any()


@pytest.mark.parametrize("collected", [False, True])
def test_an_ended_offer_takes_nothing_more(pair: list[Worker], collected: bool) -> None:
    owner, _ = pair
    owner.offer("gone", [1], ready=0)
    owner.abort("gone")
    if collected:
        assert ended(owner) is LeaseEnd.ABORTED
    else:
        owner.abort("gone")  # an ordinary race
    for late in (
        lambda: owner.set_ready("gone", 1),
        lambda: owner.extend("gone", 60),
        lambda: owner.offers.set_ttl("gone", 60),
    ):
        with pytest.raises(UnknownRequest, match="gone"):
            late()


class Kernels:
    """Pass when told, and know whether somebody has seen it."""

    passed = seen = False

    def query(self) -> bool:
        self.seen = self.passed
        return self.passed


def test_kernels_of_an_aborted_offer_are_not_another_requests_progress(pair: list[Worker]) -> None:
    owner, reader = pair
    kernels = Kernels()
    owner.offer("late", [1], after=kernels, readers=3)
    owner.abort("late")
    assert ended(owner) is LeaseEnd.ABORTED
    following = owner.offer("next", [2], ready=0, readers=3)  # has the slots
    pull = reader.pull(following, into=[3], settle=False)
    kernels.passed = True
    while not kernels.seen:
        assert not pull.done()
    owner.set_ready("next", 1)
    assert pull.wait(20)
