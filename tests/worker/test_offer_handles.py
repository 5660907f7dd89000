# SPDX-License-Identifier: Apache-2.0
"""A ticket or a seat names one offer, and a call that comes late with it meets no later offer of the same request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
from transports.pools import PoolSpec

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.errors import StaleBlocks, UnknownRequest

BLOCKS = [1, 2, 3]


@pytest.fixture
def owner() -> Iterator[Worker]:
    with Worker(PoolSpec().make(), "owner", config=WorkerConfig(transports="loopback")) as owner:
        yield owner


@pytest.fixture
def reader() -> Iterator[Worker]:
    with Worker(PoolSpec().make(), "reader", config=WorkerConfig(transports="loopback")) as reader:
        yield reader


CALLS = {
    "set_ready": lambda owner, offer: owner.set_ready(offer, 3),
    "extend": lambda owner, offer: owner.extend(offer, 60.0),
    "abort": lambda owner, offer: owner.abort(offer),
    "set_ttl": lambda owner, offer: owner.offers.set_ttl(offer, 60.0),
    "hand_off": lambda owner, offer: owner.offers.hand_off(offer, 3, 60.0),
}
"""The calls that act on an offer."""


def offered_again(owner: Worker) -> tuple[Ticket, Ticket]:
    first = owner.offer("r", BLOCKS, ready=0)
    owner.abort(first)
    assert len(owner.events()) == 1
    return first, owner.offer("r", BLOCKS, ready=0)


@pytest.mark.parametrize("act", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("by", ["ticket", "seat"])
def test_a_late_call_meets_no_later_offer(
    owner: Worker, reader: Worker, act: Callable[[Worker, object], None], by: str
) -> None:
    first, second = offered_again(owner)
    quiet = act is CALLS["abort"]  # what should end has ended
    with nullcontext() if quiet else pytest.raises(UnknownRequest, match="has ended"):
        act(owner, first if by == "ticket" else first.seats[0])
    pull = reader.pull(second, BLOCKS)
    assert not pull.wait(0)
    assert owner.offers.num_pinned_blocks() == 3
    act(owner, second if by == "ticket" else second.seats[0])


def test_each_seat_of_an_offer_names_it(owner: Worker) -> None:
    ticket = owner.offer("r", BLOCKS, readers=3)
    for seat in owner.split(ticket):
        owner.extend(seat, 60.0)
    owner.abort(owner.split(ticket)[2])
    assert len(owner.events()) == 1


def test_a_seat_that_was_settled_names_its_offer_still(owner: Worker, reader: Worker) -> None:
    """Another seat may be open."""
    ticket = owner.offer("r", BLOCKS, readers=2)
    first, second = owner.split(ticket)
    assert reader.pull(first, BLOCKS).wait()
    owner.offers.num_pinned_blocks()  # collects what has ended
    owner.extend(ticket, 60.0)
    owner.abort(ticket)
    with pytest.raises(StaleBlocks):
        reader.pull(second, BLOCKS).wait()


def test_a_ticket_of_another_worker_names_nothing_here(owner: Worker) -> None:
    ticket = owner.offer("r", BLOCKS)
    for other in (replace(ticket, worker_id="another"), replace(ticket, epoch=ticket.epoch + 1)):
        with pytest.raises(UnknownRequest):
            owner.abort(other)
    owner.abort(ticket)


def test_the_first_of_sixteen_offers_is_timed(owner: Worker) -> None:
    timed = []
    for number in range(17):
        owner.offer(f"r{number}", [1])
        timed.append(owner.offers.durations.count)
    assert timed == [1] * 16 + [2]
