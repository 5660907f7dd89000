# SPDX-License-Identifier: Apache-2.0
"""A future whose hooks are called at once, and one made of a coroutine."""

from __future__ import annotations

import asyncio

import pytest

from kvlink.control.rpc.eager_future import EagerFuture, eagerly


async def brings(what: int | Exception, after: asyncio.Event) -> int:
    await after.wait()
    if isinstance(what, Exception):
        raise what
    return what


async def test_who_asked_hears_of_the_answer_at_once_and_who_awaits_it_as_ever() -> None:
    heard: list[EagerFuture[int]] = []
    result, error = EagerFuture[int](), EagerFuture[int]()
    result.on_answer = error.on_answer = heard.append
    result.set_result(1)
    error.set_exception(ValueError("no"))
    assert heard == [result, error]
    assert await result == 1
    with pytest.raises(ValueError, match="no"):
        await error


async def test_who_was_to_answer_hears_once_that_nobody_waits_any_more() -> None:
    heard: list[EagerFuture[int]] = []
    answered, waiting = EagerFuture[int](), EagerFuture[int]()
    answered.on_cancel = waiting.on_cancel = heard.append
    answered.set_result(1)
    task = asyncio.ensure_future(asyncio.wait_for(waiting, 60.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not answered.cancel()
    assert not waiting.cancel()
    assert heard == [waiting]


async def test_work_is_passed_on_however_it_ends() -> None:
    go = asyncio.Event()
    good, bad = eagerly(brings(1, go)), eagerly(brings(ValueError("no"), go))
    go.set()
    assert await good == 1
    with pytest.raises(ValueError, match="no"):
        await bad


async def test_nobody_waits_for_work_that_was_given_up() -> None:
    go, ended, wrong = asyncio.Event(), asyncio.Event(), []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: wrong.append(what))

    async def work() -> int:
        try:
            return await brings(1, go)
        finally:
            ended.set()

    answer, late = eagerly(work()), eagerly(brings(1, go))
    await asyncio.sleep(0)
    assert answer.cancel()
    await ended.wait()
    go.set()
    await asyncio.sleep(0)
    assert late.cancel()  # its work is done, and not yet passed on
    for _ in range(5):
        await asyncio.sleep(0)
    assert answer.cancelled()
    assert late.cancelled()
    assert wrong == []
