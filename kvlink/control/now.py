# SPDX-License-Identifier: Apache-2.0
"""The clock of the control plane: that of the running event loop, so that who owns the loop owns the time."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds; never goes back. Outside of event loops it is what the time of theirs is: `time.monotonic`."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return time.monotonic()
    return loop.time()
