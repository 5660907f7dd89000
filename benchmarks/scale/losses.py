# SPDX-License-Identifier: Apache-2.0
"""Lets all workers of a coordinator lose it at once and come back, to the next one or to another."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator

from kvlink.control import CoordinatorClient

from ..harness.processes import BenchError
from ..measurements.control import Row
from .load import Load
from .usage import peak_share

_ASK_EVERY_S = 0.02


def restart(load: Load, workers: int, tickets: int) -> Row:
    """Measures a restart. Times count from when the next coordinator listens. `tickets` a worker come back with it."""
    load.crowds.each("brace")
    load.lose_coordinator()
    return _came_back(load, workers, workers, tickets)


def lost_replica(load: Load, workers: int, tickets: int) -> Iterator[Row]:
    """Kills another replica, which about half of the workers used: they come to this one."""
    load.crowds.shared_out("join", workers)
    load.crowds.each("offer", tickets)
    moving = sum(load.crowds.each("brace", load.other.address))
    row = _came_back(load, moving, workers, tickets, load.other.process.kill)
    yield {"what": "lost replica", "workers": workers, "moved": moving, **row}


def _came_back(
    load: Load, moving: int, workers: int, tickets: int, lose: Callable[[], None] = lambda: None
) -> Row:
    busy_s, store_s = load.cpu_s(), load.store_cpu_s()
    lost_at, rejoined, stall_s, peak = asyncio.run(_come_back(load, lose))
    busy_s, store_s = load.cpu_s() - busy_s, load.store_cpu_s() - store_s
    after_s = sorted(max(0.0, at - lost_at) for at in rejoined)
    if not after_s:
        raise BenchError(f"none of {moving} workers came back within a minute")
    status = load.status()
    complete = (status.workers, status.tickets) == (workers, workers * tickets)
    return {
        "half_joined_s": round(statistics.median(after_s), 2),
        "all_joined_s": round(after_s[-1], 2),
        "cpu_s": round(busy_s, 2),
        "store_cpu_s": round(store_s, 2),
        "peak_core": round(peak, 2),
        "longest_stall_ms": round(1e3 * stall_s),
        "verified": len(rejoined) == moving and complete and all(load.crowds.each("claim")),
    }


async def _come_back(load: Load, lose: Callable[[], None]) -> tuple[float, list[float], float, float]:
    """Returns when it was lost, when each worker had rejoined, the slowest other call and the busiest moment."""
    asking = asyncio.create_task(_longest_stall_s(load.coordinator.address))
    busy = asyncio.create_task(peak_share(load.coordinator.process.pid))
    await asyncio.sleep(_ASK_EVERY_S)
    lost_at = time.monotonic()
    lose()
    rejoined = await asyncio.to_thread(load.crowds.each, "rejoined")
    for task in (asking, busy):
        task.cancel()
    return lost_at, [at for each in rejoined for at in each], await asking, await busy


async def _longest_stall_s(address: str) -> float:
    """Returns the longest of consecutive calls until cancelled."""
    longest_s = 0.0
    async with CoordinatorClient(address, timeout_s=60.0) as client:
        asked = time.monotonic()
        try:
            while True:
                asked = time.monotonic()
                await client.status()
                longest_s = max(longest_s, time.monotonic() - asked)
                await asyncio.sleep(_ASK_EVERY_S)
        except asyncio.CancelledError:
            return max(longest_s, time.monotonic() - asked)
