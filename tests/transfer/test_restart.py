# SPDX-License-Identifier: Apache-2.0
"""A pull under a live lease whose connection was cut begins again, once; any other end is its end."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from transports.pools import PoolSpec
from waiting import eventually, until

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.errors import AccessDenied, Cancelled, PeerUnreachable, StaleBlocks
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull import Pull

CUT_ONCE = ["fail-data@1", "break-data@1", "fail-slot@2", "break-slot@2"]
INTO = [7, 6, 5]


class Pair:
    """An owner, and a reader whose reads fail by a plan."""

    def __init__(self, fault: str, inline_us: int) -> None:
        self.opened = ExitStack()
        config = WorkerConfig(transports="loopback")
        self.owner = self.opened.enter_context(Worker(PoolSpec().make(), "owner", config=config))
        config = WorkerConfig(transports="fault+loopback", fault=fault, inline_us=inline_us, lanes=1)
        self.reader = self.opened.enter_context(Worker(PoolSpec().make(), "reader", config=config))
        for region, _ in enumerate(self.owner.pool.regions):
            self.owner.pool.numpy(region)[:] = 42

    def ticket(self) -> Ticket:
        return self.owner.offer("request", [1, 2, 3])

    def start(self, into: Any = INTO, **how: Any) -> Pull:
        ticket = self.ticket()
        self.reader.connect(ticket)
        return self.reader.pull(ticket, into, **how)

    def written(self) -> list[int]:
        """Blocks of the reader that hold nothing but what the owner's hold."""
        blocks = self.reader.pool.numpy().reshape(-1, PoolSpec().num_blocks, 16 * 2 * 64)
        full = (blocks == 42).all(axis=(0, 2))
        assert not blocks[:, ~full].any(), "a block is written in part"
        return [int(block) for block in full.nonzero()[0]]


@pytest.fixture(params=[0, 500], ids=["queued", "inline"])
def pair(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Pair]]:
    with ExitStack() as pairs:

        def make(fault: str) -> Pair:
            pair = Pair(fault, request.param)
            pairs.callback(pair.opened.close)
            return pair

        yield make


@pytest.mark.parametrize("fault", CUT_ONCE)
def test_it_begins_again_when_it_was_cut(pair: Callable[[str], Pair], fault: str) -> None:
    two = pair(fault)
    pull = two.start()
    assert pull.wait()
    assert pull.stats.settled
    assert two.written() == sorted(INTO)
    taken = pull.explain()[0]
    assert "an injected fault" in taken.restarted
    assert f"read again after: {taken.restarted}" in str(taken)
    assert two.reader.stats().restarts == 1
    eventually(lambda: [event.request_id for event in two.owner.events()] == ["request"])


def test_a_pull_that_connects_first(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    assert two.reader.pull(two.ticket(), INTO).wait()
    assert two.written() == sorted(INTO)


async def test_whoever_awaits_it_begins_again(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    assert (await two.start()).settled
    assert two.written() == sorted(INTO)


async def test_whoever_asks_whether_it_is_done_begins_again(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    await until(pull.done)
    assert pull.stats.settled
    assert two.reader.stats().restarts == 1


def test_it_begins_again_once(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1..2")
    pull = two.start()
    with pytest.raises(PeerUnreachable, match="request request from owner over fault"):
        pull.wait()
    assert pull.done()
    assert two.reader.stats().restarts == 1
    assert two.written() == []
    assert two.reader.pull(two.owner.offers.tickets()[0], INTO).wait(), "the lease still lives"


def test_threads_that_look_at_once_begin_again_once(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    together, ended = threading.Barrier(8), []

    def look() -> None:
        together.wait()
        ended.append(pull.wait())

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [True] * 8
    assert two.reader.stats().restarts == 1


def test_a_refused_read_is_not_tried_again(pair: Callable[[str], Pair]) -> None:
    two = pair("deny-data@1")
    with pytest.raises(AccessDenied):
        two.start().wait()
    assert two.reader.stats().restarts == 0


def test_a_lease_that_has_ended_meanwhile_is_stale(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    two.owner.abort("request")
    with pytest.raises(StaleBlocks):
        pull.wait()


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_pull_that_ends_while_it_connects_again(
    pair: Callable[[str], Pair], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = pair("break-data@1")
    asked = threading.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    ticket = two.ticket()
    two.reader.connect(ticket)
    monkeypatch.setattr(Peers, "connect", never)
    pull = two.reader.pull(ticket, INTO)
    assert asked.wait(30)
    pull.cancel() if end == "cancel" else two.reader.close()
    assert pull.done()
    with pytest.raises(Cancelled, match=r"cancelled before|worker was closed"):
        pull.wait()
    assert two.written() == []


def test_the_caller_may_change_its_block_ids(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    into = array("I", INTO)
    pull = two.start(into)
    into[:] = array("I", [10, 11, 12])
    assert pull.wait()
    assert two.written() == sorted(INTO)


def test_an_owner_that_is_gone_is_why_the_pull_failed(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    two.owner.close()
    with pytest.raises(PeerUnreachable, match=r"an injected fault.*the pull could not restart:.*owner"):
        pull.wait()
