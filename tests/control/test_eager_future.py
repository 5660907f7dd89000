# SPDX-License-Identifier: Apache-2.0
"""Parts of the control plane's event loop: eager futures, turns, and memoized values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvlink.control.codec import Codec
from kvlink.control.codec._wire import Memoized
from kvlink.control.rpc.eager_future import EagerFuture, eagerly
from kvlink.control.rpc.server import Turns
from kvlink.control.security import Caller, set_caller


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


LONG = bytes(5_000)


async def test_one_long_message_of_each_tenant_a_turn() -> None:
    turns, decoded = Turns(), []

    def note(tenant: str) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            set_caller(Caller(tenant))
            codec: Codec[None] = Codec(lambda value: b"", lambda blob: decoded.append(tenant))
            await turns.decode(codec, LONG)

        return call

    evil = [asyncio.create_task(note("evil")()) for _ in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(*[asyncio.create_task(note("good")()) for _ in range(3)])
    assert decoded.count("good") == 3
    assert decoded.count("evil") <= 5
    await asyncio.gather(*evil)
    assert len(decoded) == 23


async def test_a_call_that_is_cancelled_gives_its_turn_away() -> None:
    turns, decoded = Turns(), []
    codec: Codec[None] = Codec(lambda value: b"", decoded.append)
    first, second, third = (asyncio.create_task(turns.decode(codec, LONG)) for _ in range(3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await third
    assert len(decoded) == 1


def make_memoized(most: int) -> tuple[Memoized[list[int], int], list[list[int]]]:
    made: list[list[int]] = []

    def total(value: list[int]) -> int:
        made.append(value)
        return sum(value)

    return Memoized(total, most), made


def test_each_value_is_made_once() -> None:
    memoized, made = make_memoized(8)
    one, equal = [1, 2], [1, 2]
    assert [memoized(one), memoized(equal), memoized(one), memoized(equal)] == [3, 3, 3, 3]
    assert made[0] is one
    assert made[1] is equal
    assert len(made) == 2


def test_the_oldest_is_forgotten() -> None:
    memoized, made = make_memoized(2)
    values = [[1], [2], [3]]
    assert [memoized(value) for value in values] == [1, 2, 3]
    assert memoized(values[2]) == 3
    assert len(made) == 3
    assert memoized(values[0]) == 1
    assert len(made) == 4


def test_values_that_are_gone_do_not_come_back_as_others() -> None:
    memoized, _ = make_memoized(4)
    assert [memoized([number]) for number in range(1_000)] == list(range(1_000))


def test_what_fails_is_tried_again() -> None:
    memoized = Memoized(lambda value: 1 // value[0], 2)
    zero = [0]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            memoized(zero)
