# SPDX-License-Identifier: Apache-2.0
"""A reader that needs nothing gives the blocks back unread: without a connection, and without waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from control.processes import CoordinatorProcess
from transports.pairs import Pair
from transports.pools import PoolSpec
from transports.processes import RemoteWorker, eventually

from kvlink import Worker
from kvlink.errors import ConfigError

NewPair = Callable[..., Pair]
NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]

NOTHING: list[tuple[list[int], dict[str, Any]]] = [
    ([], {"tokens": (3, 3)}),
    ([], {"tokens": (0, 0)}),
    ([1, 2, 3], {"tokens": (2, 2)}),
    ([1, 2, 3], {"layers": (0, 0)}),
    ([1, 2, 3], {"layers": (1, 1), "tokens": (0, 2)}),
    ([], {"layers": (1, 1)}),
    ([], {}),
]


def test_of_a_connected_owner(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    connected = [id(peer.connection) for peer in pair.reader.peers()]
    ticket = pair.offer([3, 9, 4], request_id="unread")
    pair.reader.release(ticket)
    assert pair.owner.fate_of("unread") == "settled"
    assert [id(peer.connection) for peer in pair.reader.peers()] == connected


def test_of_an_owner_that_nobody_has_connected_to(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.reader.release(pair.offer([3, 9, 4], request_id="unread"))
    assert pair.owner.fate_of("unread") == "settled"
    assert pair.reader.peers() == []
    assert pair.reader.stats().connects.count == 0


def test_of_an_owner_whose_connection_broke(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()
    for peer in pair.reader.peers():
        peer.connection.close()
    pair.reader.release(pair.offer([3, 9, 4], request_id="unread"))
    assert pair.owner.fate_of("unread") == "settled"


def test_of_what_has_ended_is_quiet(new_pair: NewPair, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kvlink")
    pair = new_pair("tcp")
    for connected in (False, True):
        settled, aborted = pair.offer([1]), pair.offer([2])
        pair.owner.do("abort", request_id=aborted.request_id)
        assert pair.owner.fate_of(aborted.request_id) == "aborted"
        pair.reader.release(settled)
        assert pair.owner.fate_of(settled.request_id) == "settled"
        later = pair.offer([1, 2])  # may have a slot of theirs
        for _ in range(3):
            pair.reader.release([settled, aborted])
        pair.pull(later, [5, 6])
        assert pair.owner.fate_of(later.request_id) == "settled"
        assert bool(pair.reader.peers()), connected
    assert caplog.records == []


def test_of_a_worker_that_restarted_is_quiet(
    new_owner: NewOwner, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvlink")
    owner = new_owner(PoolSpec(), transports="tcp")
    reader = new_reader(PoolSpec(), transports="tcp", ticket_keys="none")
    ticket = owner.offer([1, 2])
    reader.release(replace(ticket, epoch=ticket.epoch - 1))
    owner.offer([1], request_id="live")
    reader.release(owner.offer([2], request_id="other"))
    assert owner.fate_of("other") == "settled"
    assert owner.do("counts")["active"] == 2
    assert caplog.records == []


@pytest.mark.parametrize("connected", [False, True])
def test_every_rank_gives_back_its_own_seat(
    new_owner: NewOwner, new_reader: NewReader, connected: bool
) -> None:
    owners = [
        new_owner(PoolSpec(total_heads=4, tp_rank=rank, tp_size=2), transports="cma") for rank in range(2)
    ]
    readers = [
        new_reader(PoolSpec(total_heads=4, tp_rank=rank, tp_size=4), transports="cma") for rank in range(4)
    ]
    tickets = [owner.offer([1, 2], request_id="shared", readers=2) for owner in owners]
    for number, reader in enumerate(readers):
        if connected:
            reader.connect(tickets[number // 2])
        assert owners[number // 2].do("events") == []
        reader.release(tickets)
        if number % 2:
            assert owners[number // 2].fate_of("shared") == "settled"
    whole = new_reader(PoolSpec(total_heads=4), transports="cma")
    whole.release([owner.offer([1, 2], request_id="one reader") for owner in owners])
    assert [owner.fate_of("one reader") for owner in owners] == ["settled"] * 2


@pytest.mark.parametrize(("into", "ranges"), NOTHING)
def test_a_pull_of_nothing(new_pair: NewPair, into: list[int], ranges: dict[str, Any]) -> None:
    pair = new_pair("shm")
    for told_at_once in (False, True):
        pull = pair.reader.pull(pair.offer([3, 9, 4], request_id=f"unread {told_at_once}"), into, **ranges)
        assert pull.done()
        assert pull.wait(0)
        assert (pull.stats.num_bytes, pull.stats.settled) == (0, told_at_once)
        assert pull.explain() == []
        assert pair.owner.fate_of(f"unread {told_at_once}") == "settled"
        pair.works()


async def test_a_pull_of_nothing_that_is_settled_later(new_pair: NewPair) -> None:
    pair = new_pair("tcp")
    pull = pair.reader.pull(pair.offer([3, 9, 4], request_id="unread"), [], settle=False)
    assert not (await pull).settled
    pair.works()
    assert "unread" not in dict(pair.owner.do("events"))
    assert pull.settle()
    assert pair.owner.fate_of("unread") == "settled"


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess(lease_s=10)
    yield process
    process.kill()


def test_by_request_id(coordinator: CoordinatorProcess, new_pair: NewPair) -> None:
    pair = new_pair("shm", coordinator=coordinator.address)
    for number in range(2):
        pair.offer([number], request_id=f"unread {number}", publish=True)
    pair.reader.release("unread 0")
    assert pair.reader.pull("unread 1", []).done()
    for number in range(2):
        assert pair.owner.fate_of(f"unread {number}") == "settled"
    assert pair.reader.peers() == []


def test_what_cannot_be_given_back(
    new_owner: NewOwner, new_reader: NewReader, caplog: pytest.LogCaptureFixture
) -> None:
    owner = new_owner(PoolSpec(total_heads=4), transports="shm")
    reader = new_reader(PoolSpec(total_heads=4, tp_rank=1, tp_size=2), transports="shm")
    with pytest.raises(ConfigError, match="at least one"):
        reader.release([])
    with pytest.raises(ConfigError, match="coordinator"):
        reader.release("by id")
    alone = owner.offer([1])
    reader.release(alone)  # has no seat for it, as its owner's card will show
    eventually(lambda: "readers=2" in caplog.text)
    reader.pull(owner.offer([1], readers=2), [1], settle=False).wait(20)
    with pytest.raises(ConfigError, match="readers=2"):
        reader.release(alone)
    reader.close()
    with pytest.raises(ConfigError, match="closed"):
        reader.release(alone)
