# SPDX-License-Identifier: Apache-2.0
"""Collects a scene for each background loop: an exception that nobody expects, and then the next item, which is served.

Each module `loops_of_*.py` in this folder registers scenes by the names of their loops. A scene may be a coroutine
function, which runs in virtual time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from virtual_time import run

SCENES: dict[str, Callable[[], None]] = {}


class Unexpected(Exception):
    """No code of kvlink knows it."""


def scene(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Registers a function as the scene of the loop called `name`."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in SCENES, f"{name} has two scenes"
        is_virtual = inspect.iscoroutinefunction(function)
        SCENES[name] = (lambda: run(function)) if is_virtual else function
        return function

    return register


@contextmanager
def failing(owner: Any, attribute: str, times: int = 1) -> Iterator[None]:
    """Makes the next calls of a function or method raise Unexpected, and then work. Checks that they were made."""
    call, left = getattr(owner, attribute), [None] * times

    async def fail() -> None:
        raise Unexpected

    def fail_or_call(*args: Any, **kwargs: Any) -> Any:
        if not left:
            return call(*args, **kwargs)
        left.pop()
        if inspect.iscoroutinefunction(call):
            return fail()
        raise Unexpected

    with mock.patch.object(owner, attribute, fail_or_call):
        yield
    assert not left, f"{attribute} of {owner} was not called"


class FailingOnce:
    """A callable that raises Unexpected at its first call, and notes the arguments of the others."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.calls: list[Any] = []

    def __call__(self, *args: Any) -> None:
        self.num_calls += 1
        if self.num_calls == 1:
            raise Unexpected
        self.calls.append(args)


async def passes(seconds: float = 10.0) -> None:
    """Lets virtual time pass, in which loops start again."""
    await asyncio.sleep(seconds)
