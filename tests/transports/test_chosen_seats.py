# SPDX-License-Identifier: Apache-2.0
"""Leases at seats that a scheduler chose, tickets that it wrote, and readers that are fewer than the seats."""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Iterator

import numpy as np
import pytest

from kvlink import BlockPool, LeaseEnd, LeaseEvent, Ticket, Worker, WorkerConfig
from kvlink.errors import ConfigError, StaleBlocks, UnknownRequest
from kvlink.layout import Geometry, dense
from kvlink.ticket import LeaseSeat

LAYOUT = dense(Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=8, block_tokens=4))


@pytest.fixture(params=["loopback", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[Worker]]:
    config = WorkerConfig(transports=request.param, lease_slots=32, ticket_keys="none")
    with (
        Worker(BlockPool.allocate(LAYOUT), "owner", config=config) as owner,
        Worker(BlockPool.allocate(LAYOUT), "reader", config=config) as reader,
    ):
        rng = np.random.default_rng(1)
        owner.pool.numpy()[:] = rng.integers(1, 255, owner.pool.numpy().size, np.uint8)
        workers = [owner, reader]
        yield workers
        workers.clear()  # pytest keeps what a fixture gave until after the leak check
    del owner, reader


def seats(*slots: int) -> tuple[LeaseSeat, ...]:
    return tuple(LeaseSeat(slot, secrets.randbits(63) + 256, secrets.randbits(63) + 256) for slot in slots)


def ticket_of(owner: Worker, request_id: str, chosen: tuple[LeaseSeat, ...]) -> Ticket:
    card = owner.card
    ids = array("I", [1, 5])
    return Ticket(request_id, card.worker_id, card.epoch, card.agent, chosen, ids, num_tokens=8, ready=2)


def ended(owner: Worker, within_s: float = 5.0) -> list[LeaseEvent]:
    deadline = time.monotonic() + within_s
    while not (events := owner.events()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return events


def test_the_only_reader_gives_all_seats_back(pair: list[Worker]) -> None:
    owner, reader = pair
    chosen = seats(3, 4, 5, 6)
    owner.offers.grant_at("r", chosen, ttl_s=60)
    pull = reader.pull(ticket_of(owner, "r", chosen), into=[0, 2])
    assert pull.wait(10)
    block = LAYOUT.block_stride
    assert (reader.pool.numpy()[:block] == owner.pool.numpy()[block : 2 * block]).all()
    [event] = ended(owner)
    assert (event.request_id, event.how) == ("r", LeaseEnd.SETTLED)
    owner.offers.grant_at("r", chosen, ttl_s=60)  # the slots are free again, and so is the name


def test_blocks_count_as_pinned_from_when_they_are_handed_off(pair: list[Worker]) -> None:
    owner, _ = pair
    owner.offers.grant_at("r", seats(3), ttl_s=60)
    assert owner.stats().pinned_blocks == 0, "the server's own, so far"
    owner.offers.hand_off("r", 2, ttl_s=60)
    assert owner.stats().pinned_blocks == 2
    owner.offer("s", [1, 2, 3])
    assert owner.stats().pinned_blocks == 5
    owner.abort("r")
    assert owner.stats().pinned_blocks == 3
    with pytest.raises(UnknownRequest):
        owner.offers.hand_off("r", 2, ttl_s=60)


def test_a_request_in_two_pulls_is_settled_once(pair: list[Worker]) -> None:
    owner, reader = pair
    chosen = seats(1, 2)
    owner.offers.grant_at("r", chosen, ttl_s=60)
    ticket = ticket_of(owner, "r", chosen)
    pulls = [reader.pull(ticket, into=[0, 2], layers=(n, n + 1), settle=False) for n in (0, 1)]
    assert all(pull.wait(10) for pull in pulls)
    assert owner.events() == []
    assert pulls[1].settle()
    assert [event.how for event in ended(owner)] == [LeaseEnd.SETTLED]


def test_before_the_grant_and_after_the_end_nothing_passes(pair: list[Worker]) -> None:
    owner, reader = pair
    chosen = seats(7)
    ticket = ticket_of(owner, "r", chosen)
    with pytest.raises(StaleBlocks):
        reader.pull(ticket, into=[0, 2]).wait(10)
    owner.offers.grant_at("r", chosen, ttl_s=3600)
    owner.offers.set_ttl("r", 0.05)
    assert [event.how for event in ended(owner)] == [LeaseEnd.EXPIRED]
    with pytest.raises(StaleBlocks):
        reader.pull(ticket, into=[0, 2]).wait(10)


def test_seats_that_are_taken_are_refused(pair: list[Worker]) -> None:
    owner, _ = pair
    owner.offers.grant_at("a", seats(1, 2), ttl_s=60)
    for wrong in (seats(2), seats(0), seats(4096), ()):
        with pytest.raises(ConfigError):
            owner.offers.grant_at("b", wrong, ttl_s=60)
    with pytest.raises(ConfigError, match="offered already"):
        owner.offers.grant_at("a", seats(3), ttl_s=60)
    owner.offers.grant_at("b", seats(3), ttl_s=60)
