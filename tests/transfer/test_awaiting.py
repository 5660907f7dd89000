# SPDX-License-Identifier: Apache-2.0
"""An operation that tasks await, and that a task may run, ends as the exception says that is thrown into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvlink.transfer.completion import SharedAwaitable


class Once(SharedAwaitable[int]):
    """Ends when it is told. Notes whether it was cancelled."""

    def __init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def _ended(self) -> int:
        return await self.end

    async def _cancelled(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        pass

    def __await__(self) -> Any:
        return self._ended().__await__()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    "throw",
    [
        lambda one: one.throw(ValueError("why")),
        lambda one: one.throw(ValueError, ValueError("why")),
        lambda one: one.throw(ValueError, ValueError("why"), None),
    ],
)
async def test_what_is_thrown_into_it_comes_out(throw: Callable[[Once], object], begun: bool) -> None:
    one = Once()
    if begun:
        one.send(None)
    with pytest.raises(ValueError, match="why"):
        throw(one)
    assert not one.cancelled


async def test_a_class_is_thrown_as_one_of_its_exceptions() -> None:
    one = Once()
    with pytest.raises(asyncio.CancelledError):
        one.throw(asyncio.CancelledError)
    assert one.cancelled


async def test_a_task_that_is_cancelled_before_its_first_step_cancels_it() -> None:
    one = Once()
    task = asyncio.create_task(one)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.cancelled


async def test_several_tasks_get_the_result() -> None:
    one = Once()
    tasks = [asyncio.create_task(one) for _ in range(2)]
    await asyncio.sleep(0)
    one.end.set_result(7)
    assert [await task for task in tasks] == [7, 7]
