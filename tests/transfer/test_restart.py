# SPDX-License-Identifier: Apache-2.0
"""A pull under a live lease whose connection was cut begins again, once; any other end is its end."""

from __future__ import annotations

import asyncio
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transfer_stats import TransferStats
from transports.pools import PoolSpec
from waiting import eventually, until

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.errors import (
    AccessDenied,
    ConfigError,
    KVLinkError,
    PeerUnreachable,
    StaleBlocks,
    TransferTimeout,
)
from kvlink.transfer.engine import FAILED, RUNNING, SETTLED, VALID
from kvlink.transfer.pull import Pull, PullStats
from kvlink.transfer.pull_start import Part, PullStart, connect_all
from kvlink.transfer.restart import Restart

CUT_ONCE = ["fail-data@1", "break-data@1", "fail-slot@2", "break-slot@2"]
INTO = [7, 6, 5]


class Pair:
    """An owner, and a reader whose reads fail by a plan."""

    def __init__(self, fault: str, inline_bytes: int) -> None:
        self.opened = ExitStack()
        config = WorkerConfig(transports="loopback")
        self.owner = self.opened.enter_context(Worker(PoolSpec().make(), "owner", config=config))
        config = WorkerConfig(transports="fault+loopback", fault=fault, inline_bytes=inline_bytes, lanes=1)
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


@pytest.fixture(params=[0, 1 << 20], ids=["queued", "inline"])
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


def test_a_cancelled_pull_does_not_begin_again(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    eventually(lambda: pull._started(0)[0][2].done())  # type: ignore[index]
    pull.cancel()
    with pytest.raises(PeerUnreachable):
        pull.wait()
    assert two.reader.stats().restarts == 0


def test_a_closed_worker_begins_nothing(pair: Callable[[str], Pair]) -> None:
    two = pair("break-data@1")
    pull = two.start()
    eventually(lambda: pull._started(0)[0][2].done())  # type: ignore[index]
    two.reader.close()
    with pytest.raises(PeerUnreachable):
        pull.wait()


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


class Starts:
    """Begins nothing, and remembers what it was asked to."""

    def __init__(self) -> None:
        self.closing = False
        self.num_restarts = 0
        self.asked: list[tuple[Any, ...]] = []
        self.starting = PullStart()

    def start(self, connect: Any, want: Any, kept: Any) -> PullStart:
        self.asked.append((connect.args[1], want, kept))
        return self.starting


def part(name: str, state: int, failed: type[KVLinkError] = PeerUnreachable) -> Part:
    transfer = SimpleNamespace(
        state=state,
        done=lambda: transfer.state != RUNNING,
        failure=lambda: (failed.__name__, f"{name} failed", "", 0) if transfer.state == FAILED else None,
        stats=TransferStats,
        cancel=lambda: None,
    )
    return cast(Part, (SimpleNamespace(worker_id=name), SimpleNamespace(transport="made up"), transfer))


def restart(starts: Starts, began: float = 1e12) -> Restart:
    return Restart(cast(Any, starts), cast(Any, None), (array("I", [1]), None, None, True, 5.0), began)


def test_of_several_owners_those_are_read_again_that_were_cut() -> None:
    starts = Starts()
    parts = [part("a", SETTLED), part("b", FAILED), part("c", VALID)]
    again = restart(starts)
    assert again.begin("request", parts) is not None
    assert [(tickets, kept) for tickets, _, kept in starts.asked] == [([parts[1][0]], [parts[0], parts[2]])]
    assert list(again.cut) == ["b"]
    assert again.begin("request", parts) is None


def test_nothing_begins_again_when_one_owner_failed_otherwise() -> None:
    again = restart(Starts())
    assert again.begin("request", [part("a", FAILED), part("b", FAILED, StaleBlocks)]) is None
    assert again.cut == {}


def test_nothing_begins_again_after_the_deadline() -> None:
    starts = Starts()
    assert restart(starts, began=-1e12).begin("request", [part("a", FAILED)]) is None
    assert starts.num_restarts == 0


class Peers:
    """Connections of which the first one breaks before anything is read."""

    def __init__(self) -> None:
        self.num_connects = 0

    async def connect(self, *_: object) -> Any:
        self.num_connects += 1
        return SimpleNamespace(connection=SimpleNamespace(broken=self.num_connects == 1))


async def test_a_connection_that_breaks_before_the_start_is_replaced() -> None:
    peers, ticket = Peers(), SimpleNamespace(request_id="r", worker_id="w", epoch=1, agent="", trace=None)
    connected = await connect_all(cast(Any, peers), [cast(Ticket, ticket)], deadline=1e12)
    assert [peer.connection.broken for _, peer in connected] == [False]
    assert peers.num_connects == 2


class Waiter:
    """Stands in for the loop's waiter, which waits for a C++ thread."""

    @classmethod
    def of_running_loop(cls) -> Waiter:
        return cls()

    async def ended(self, transfer: Any) -> None:
        await until(transfer.done)


def awaited(monkeypatch: pytest.MonkeyPatch, starts: Starts) -> tuple[Any, asyncio.Task[object]]:
    """A transfer, and who awaits it."""
    monkeypatch.setattr("kvlink.transfer.pull.LoopWaiter", Waiter)
    first = part("a", RUNNING)
    pull = Pull("request", [first], None, None, None, restart(starts))

    async def wait() -> object:
        return await pull

    return first[2], asyncio.create_task(wait())


async def cut_while_awaited(monkeypatch: pytest.MonkeyPatch, starts: Starts) -> asyncio.Task[object]:
    transfer, task = awaited(monkeypatch, starts)
    await asyncio.sleep(0)
    transfer.state = FAILED
    await until(lambda: starts.asked)
    assert not task.done()
    return task


async def test_it_is_cut_while_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts()
    transfer, task = awaited(monkeypatch, starts)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    transfer.state = FAILED
    with pytest.raises(asyncio.CancelledError):
        await task
    assert starts.asked == []


async def test_it_is_cut_while_somebody_awaits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts()
    task = await cut_while_awaited(monkeypatch, starts)
    starts.starting.set_result([part("a", SETTLED)])
    assert cast(PullStats, await task).settled


async def test_it_is_cancelled_when_it_has_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = Starts()
    task = await cut_while_awaited(monkeypatch, starts)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert starts.starting.cancelled()
    assert len(starts.asked) == 1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(ConfigError, PeerUnreachable), (StaleBlocks, StaleBlocks), (TransferTimeout, TransferTimeout)],
)
def test_what_it_fails_with_when_it_could_not_begin_again(
    error: type[KVLinkError], kind: type[KVLinkError]
) -> None:
    again = restart(Starts())
    assert type(again.failed(error("no"))) is error, "it could not begin at all"
    assert again.begin("request", [part("a", FAILED)]) is not None
    assert type(again.failed(error("no"))) is kind
