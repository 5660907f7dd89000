# SPDX-License-Identifier: Apache-2.0
"""Calls that block, beside the event loop that asks for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from kvlink.errors import Cancelled

T = TypeVar("T")


def off_loop(call: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Runs on a thread of the running loop. Raises Cancelled, not in the future, while the interpreter ends: executors
    are the first to stop, long before anybody closes what still serves or pulls."""
    loop = asyncio.get_running_loop()
    try:
        return loop.run_in_executor(None, call, *args)
    except RuntimeError:
        raise Cancelled("this process is ending") from None
