# SPDX-License-Identifier: Apache-2.0
"""Leaving a `with` or `async with` block of a pull raises an error that nobody has seen, and no other one again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvlink import BlockPool, Pull, Ticket, Worker
from kvlink.errors import Cancelled, StaleBlocks
from kvlink.layout import Geometry, dense


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
