# SPDX-License-Identifier: Apache-2.0
"""Pulls in blocks of with statements, and pulls that are cancelled."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transfer_stats import TransferStats

from kvlink import BlockPool, Ticket, Worker
from kvlink.errors import Cancelled, ConfigError, StaleBlocks
from kvlink.layout import Geometry, dense
from kvlink.transfer.pull import FAILED, SETTLED, Pull
from kvlink.transfer.pulls import Pulls

_WAITING, _READING = 0, 2


class HeldCore:
    """A pull of the core whose NIC has its reads already."""

    def __init__(self, state: int = _READING) -> None:
        self.state = state
        self.cancels = 0
        self.blocking_waits = 0
        self._ended = asyncio.Event()

    def request_cancel(self) -> None:
        self.cancels += 1
        if self.state == _WAITING:
            self.end()

    def cancel(self) -> None:
        self.request_cancel()
        self.wait(-1)

    def wait(self, timeout_s: float) -> bool:
        if timeout_s < 0:
            self.blocking_waits += 1
            self.end()
        return self.done()

    def done(self) -> bool:
        return self.state >= FAILED

    def failure(self) -> tuple[str, str, str, int] | None:
        return ("Cancelled", "cancelled before it was connected", "", 0) if self.state == FAILED else None

    def transfer(self, _part: int) -> Any:
        return SimpleNamespace(stats=TransferStats, failure=lambda: None)

    def end(self) -> None:
        if not self.done():
            self.state = FAILED if self.cancels else SETTLED
            self._ended.set()

    async def ended(self) -> None:
        await self._ended.wait()


class Waiter:
    """Stands in for the loop's waiter, which waits for a C++ thread."""

    @classmethod
    def of_running_loop(cls) -> Waiter:
        return cls()

    async def ended(self, core: HeldCore) -> None:
        await core.ended()


class Owner:
    worker_id = "owner"
    transport = "made up"


@pytest.fixture
async def held(monkeypatch: pytest.MonkeyPatch) -> HeldCore:
    monkeypatch.setattr("kvlink.transfer.pull.LoopWaiter", Waiter)
    return HeldCore()


def running(held: HeldCore) -> Pull:
    return Pull(cast(Any, held), "request", [cast(Any, (Owner(), Owner()))])


async def turns(task: asyncio.Future[Any]) -> bool:
    """Whether it has ended after all that it can do by itself."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


async def wait_for(pull: Pull) -> object:
    return await pull


async def test_a_cancelled_await_ends_once_the_reads_have(held: HeldCore) -> None:
    task = asyncio.create_task(wait_for(running(held)))
    assert not await turns(task)
    assert held.cancels == 0
    for _ in range(3):  # the second must not cut the first one's work short
        task.cancel()
        assert not await turns(task)
        assert held.cancels
    held.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held.blocking_waits == 0, "the loop was blocked"


async def test_wait_for_returns_once_the_reads_have_ended(held: HeldCore) -> None:
    pull = running(held)
    task = asyncio.create_task(asyncio.wait_for(pull, 0))  # cancels it before it began
    assert not await turns(task)
    held.end()
    with pytest.raises(asyncio.TimeoutError):
        await task
    assert held.cancels
    with pytest.raises(Cancelled):
        pull.wait()


async def test_a_task_runs_a_pull_as_a_coroutine(held: HeldCore) -> None:
    pull = running(held)
    tasks = [asyncio.create_task(pull) for _ in range(3)]
    assert not await turns(tasks[0])
    held.end()
    assert [(await task).settled for task in tasks] == [True] * 3
    assert (await asyncio.create_task(pull)).settled


async def test_a_task_that_is_cancelled_before_its_first_step(held: HeldCore) -> None:
    pull = running(held)
    task = asyncio.create_task(pull)
    task.cancel()
    assert not await turns(task)
    assert held.cancels
    held.end()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_task_of_gather_cancels_every_pull(held: HeldCore) -> None:
    pulls = [running(HeldCore(_WAITING)) for _ in range(3)]
    task = asyncio.ensure_future(asyncio.gather(*pulls))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pull in pulls:
        with pytest.raises(Cancelled, match="before it was connected"):
            pull.wait(0)


async def test_cancelled_by_one_of_two_who_await(held: HeldCore) -> None:
    pull = running(held)
    one, other = (asyncio.create_task(wait_for(pull)) for _ in range(2))
    await turns(one)
    one.cancel()
    assert not await turns(one)
    held.end()
    with pytest.raises(asyncio.CancelledError):
        await one
    with pytest.raises(Cancelled):
        await other


async def test_an_await_of_an_ended_pull_costs_no_turn_of_the_loop() -> None:
    turned: list[bool] = []
    asyncio.get_running_loop().call_soon(turned.append, True)
    assert (await running(HeldCore(SETTLED))).settled
    assert turned == []


async def test_shielded_it_goes_on(held: HeldCore) -> None:
    pull = running(held)
    task = asyncio.ensure_future(asyncio.shield(pull))
    await turns(task)
    task.cancel()
    assert await turns(task)
    assert held.cancels == 0
    held.end()
    assert (await pull).settled
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_closed_coroutine_has_ended_the_reads(held: HeldCore) -> None:
    waiting = running(held).__await__()
    next(waiting)
    waiting.close()
    assert held.cancels == held.blocking_waits == 1


async def test_a_closed_coroutine_of_a_fork_leaves_the_parents_reads_alone(
    held: HeldCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = running(held).__await__()
    next(waiting)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    waiting.close()
    assert held.cancels == held.blocking_waits == 0


async def test_leaving_an_async_block_by_an_exception_cancels(held: HeldCore) -> None:
    async def leave() -> None:
        async with running(held):
            raise LookupError

    task = asyncio.create_task(leave())
    assert not await turns(task)
    task.cancel()
    assert not await turns(task)
    assert held.cancels
    held.end()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leaving_an_async_block_waits(held: HeldCore) -> None:
    async def leave() -> Pull:
        async with running(held) as pull:
            pass
        return pull

    task = asyncio.create_task(leave())
    assert not await turns(task)
    held.end()
    assert (await task).stats.settled
    assert held.cancels == 0


async def test_leaving_a_block(held: HeldCore) -> None:
    with pytest.raises(LookupError), running(held):
        raise LookupError
    assert held.cancels == held.blocking_waits == 1
    other = HeldCore()
    with running(other) as pull:
        assert not pull.done()
    assert pull.stats.settled


@pytest.mark.parametrize("timeout_s", [-1, -0.001, float("nan")])
async def test_negative_timeouts_are_refused(held: HeldCore, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="at least 0 s"):
        running(held).wait(timeout_s)
    assert not running(held).wait(0)
    assert not running(held).wait(1e-9)
    assert held.cancels == 0


@pytest.fixture
def stale() -> Iterator[Callable[[], Pull]]:
    """Returns a function that starts a pull of an offer that has ended."""
    workers = []
    for name in ("owner", "reader"):
        pool = BlockPool.allocate(dense(Geometry(1, 1, 64, 8)), huge_pages=False)
        workers.append(Worker(pool, name, transports="loopback"))
    owner, reader = workers
    ticket: Ticket = owner.offer("r", [1])
    owner.abort("r")
    yield lambda: reader.pull(ticket, [1])
    for worker in workers:
        worker.close()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Pull]]:
    """Returns a function that starts a pull whose owner is never found."""
    pool = BlockPool.allocate(dense(Geometry(1, 1, 64, 8)), huge_pages=False)
    with Worker(pool, "reader", transports="loopback") as worker:

        async def connect(*_: Any) -> Any:
            await asyncio.get_running_loop().create_future()

        monkeypatch.setattr(type(worker._peers), "connect", connect)
        ticket = worker.offer("r", [2])
        yield lambda: worker.pull(ticket, [1], timeout_s=3600)


def test_a_failure_that_nobody_has_seen_leaves_the_block(stale: Callable[[], Pull]) -> None:
    with pytest.raises(StaleBlocks), stale():
        pass


async def test_a_failure_that_nobody_has_seen_leaves_the_async_block(stale: Callable[[], Pull]) -> None:
    with pytest.raises(StaleBlocks):
        async with stale() as pull:
            assert pull.stats.num_bytes == 0


def test_a_failure_that_the_block_handles_is_not_raised_again(stale: Callable[[], Pull]) -> None:
    with stale() as pull, pytest.raises(StaleBlocks):
        pull.wait()
    assert pull.done()


async def test_a_failure_that_the_async_block_handles_is_not_raised_again(stale: Callable[[], Pull]) -> None:
    async with stale() as pull:
        with pytest.raises(StaleBlocks):
            await pull
    async with stale() as pull:
        assert [type(each) for each in await asyncio.gather(pull, return_exceptions=True)] == [StaleBlocks]


def test_the_block_raises_its_own_error(stale: Callable[[], Pull]) -> None:
    def use() -> None:
        with stale() as pull:
            with pytest.raises(StaleBlocks):
                pull.wait()
            raise KeyError

    with pytest.raises(KeyError):
        use()


def test_a_pull_that_the_block_cancels_raises_nothing(endless: Callable[[], Pull]) -> None:
    with endless() as pull:
        pull.cancel()
    assert pull.done()
    with pytest.raises(Cancelled):  # who asks is told all the same
        pull.wait()


async def test_a_wait_that_was_cut_raises_nothing(endless: Callable[[], Pull]) -> None:
    async with endless() as pull:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pull, 0)
        waiting = asyncio.ensure_future(pull)
        waiting.cancel()
    assert pull.done()


def test_a_pull_that_its_worker_cancels_is_a_failure_that_nobody_has_seen(
    endless: Callable[[], Pull],
) -> None:
    def use() -> None:
        with endless() as pull:
            pull._core.close()

    with pytest.raises(Cancelled):
        use()


def test_cancelling_a_pull_that_has_failed_does_not_hide_why(stale: Callable[[], Pull]) -> None:
    def use() -> None:
        with stale() as pull:
            while not pull.done():
                pass
            pull.cancel()

    with pytest.raises(StaleBlocks):
        use()


def test_pulls_that_have_ended_make_room_for_others() -> None:
    """The control thread learns of an end late, or not while it is busy."""
    pulls = Pulls.__new__(Pulls)
    pulls._live, pulls._most_live, pulls._closed = {}, 2, False
    for token, is_open in ((1, True), (2, False), (3, True)):
        core = SimpleNamespace(token=token, is_open=is_open, begin=lambda: None)
        pulls._add(cast(Any, SimpleNamespace(pull=SimpleNamespace(_core=core))))
    assert list(pulls._live) == [1, 3]
