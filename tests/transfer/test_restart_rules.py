# SPDX-License-Identifier: Apache-2.0
"""Which parts of a pull begin again, and when none does, is decided without workers."""

from __future__ import annotations

import asyncio
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transfer_stats import TransferStats
from waiting import until

from kvlink import Ticket
from kvlink.errors import (
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
