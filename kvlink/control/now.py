# SPDX-License-Identifier: Apache-2.0
"""The control plane reads the clock of the running event loop, so whatever owns the loop controls time."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Returns monotonic seconds: the time of the running event loop, or `time.monotonic` without one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.monotonic()
    return loop.time()
