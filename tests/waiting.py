# SPDX-License-Identifier: Apache-2.0
"""Waits for what another thread, task or process does. The test's own timeout alone ends a wait that is in vain."""

from __future__ import annotations

import asyncio
import inspect
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_POLL_S = 0.002

T = TypeVar("T")


def eventually(holds: Callable[[], T]) -> T:
    """Returns the first true result of `holds`."""
    while not (result := holds()):
        time.sleep(_POLL_S)
    return result


async def until(holds: Callable[[], T | Awaitable[T]]) -> T:
    """Returns the first true result of `holds`, which may be a coroutine function."""
    while True:
        result = holds()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        await asyncio.sleep(_POLL_S)


@contextmanager
def closed_port() -> Iterator[str]:
    """Yields an address of loopback that refuses connections: bound, so that nobody else gets it, and not listening."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"
