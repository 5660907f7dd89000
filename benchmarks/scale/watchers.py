# SPDX-License-Identifier: Apache-2.0
"""Measures watchers, which are notified of every change: the cost of one change, and of all workers watching all."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator

from kvlink.control import CoordinatorClient
from kvlink.control.codec import CoordinatorCalls
from kvlink.types import Joined, WorkerChange

from ..measurements.control import Row
from .crowd import make_card
from .load import Load

_FIRST_MARK = 1 << 20


def fan_out(load: Load, watchers: int, changes: int) -> Iterator[Row]:
    """Lets one worker change its card `changes` times, while others watch."""
    load.crowds.shared_out("watch", watchers)
    delivered_ms, last_ms, busy_s = asyncio.run(_change(load, changes))
    yield {
        "what": "fan-out",
        "workers": watchers,
        "events": changes,
        "event_bytes": _event_bytes(),
        "p50_ms": round(statistics.median(delivered_ms), 1),
        "p99_ms": round(delivered_ms[len(delivered_ms) * 99 // 100], 1),
        "last_p50_ms": round(statistics.median(last_ms), 1),
        "cpu_ms_per_event": round(1e3 * busy_s / changes, 2),
        "cpu_us_per_delivery": round(1e6 * busy_s / len(delivered_ms), 1),
        "verified": len(delivered_ms) == watchers * changes,
    }


async def _change(load: Load, changes: int) -> tuple[list[float], list[float], float]:
    """Returns milliseconds from the call that changes the card: each delivery, each event's last; then CPU time."""
    delivered_ms: list[float] = []
    last_ms: list[float] = []

    async with CoordinatorClient(load.coordinator.address, timeout_s=60.0) as client:

        async def change(mark: int) -> list[float]:
            began = time.monotonic()
            await client.join(make_card("changes", mark))
            seen = await asyncio.to_thread(load.crowds.each, "seen", mark)
            return [1e3 * (at - began) for each in seen for at in each]

        await change(_FIRST_MARK)  # and every watcher starts from here
        busy_s = load.cpu_s()
        for number in range(1, changes + 1):
            taken_ms = await change(_FIRST_MARK + number)
            delivered_ms += taken_ms
            last_ms.append(max(taken_ms))
        busy_s = load.cpu_s() - busy_s
    return sorted(delivered_ms), last_ms, busy_s


def _event_bytes() -> int:
    event = [WorkerChange(Joined.UP, make_card("changes", _FIRST_MARK))]
    return len(CoordinatorCalls.WATCH_WORKERS.reply.encode(event))


def watch_each_other(load: Load, workers: int) -> Iterator[Row]:
    """Lets all workers join while each of them watches all. This cost is inherently quadratic."""
    load.crowds.shared_out("watch", workers)
    began, busy_s = time.monotonic(), load.cpu_s()
    load.crowds.shared_out("join", workers)
    delivered = sum(load.crowds.each("all_known", workers))
    took_s, busy_s = time.monotonic() - began, load.cpu_s() - busy_s
    yield {
        "what": "watch each other",
        "workers": workers,
        "seconds": round(took_s, 2),
        "cpu_s": round(busy_s, 3),
        "deliveries": delivered,
        "cpu_us_per_delivery": round(1e6 * busy_s / delivered, 1),
        "verified": delivered == workers * workers,
    }
