# SPDX-License-Identifier: Apache-2.0
"""Waits for work on a device without blocking a thread, and without ending a capture of the engine's graphs."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Protocol

from kvlink import _core

_POLL_S = 200e-6
"""The interval between queries of a GPU event; the last kernels of a prompt take milliseconds."""


class DeviceWork(Protocol):
    """Work on a device that ends without further calls: a torch.cuda.Event, or a stream."""

    def query(self) -> bool:
        """Returns whether the work has ended. Never blocks."""


def has_ended(work: DeviceWork) -> bool:
    """Asks without breaking a capture of a graph that the engine makes meanwhile on any thread."""
    with _core.RelaxedCapture():
        return work.query()


async def until_ended(work: DeviceWork, deadline: float = math.inf) -> bool:
    """Waits until the work has ended. Returns False if it has not by `deadline`, by `time.monotonic()`."""
    while not has_ended(work):
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
