# SPDX-License-Identifier: Apache-2.0
"""Measures the resources of another process, as the kernel counts them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from ..measurements.control import cpu_s


def private_bytes(pid: int) -> int:
    """Returns the memory that would be free if the process ended, without pages that others share."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    fields = [line.split() for line in rollup if line.startswith(("Private_Clean:", "Private_Dirty:"))]
    return sum(int(kib) << 10 for _, kib, _ in fields)


def keep_to_last_core(pid: int) -> None:
    """Binds all threads of a process to the last core. The load uses the others."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {max(os.sched_getaffinity(0))})


async def peak_share(pid: int, every_s: float = 0.25) -> float:
    """Returns the share of one core in the busiest interval until cancelled."""
    most, last, then = 0.0, cpu_s(pid), time.monotonic()
    try:
        while True:
            await asyncio.sleep(every_s)
            used, now = cpu_s(pid), time.monotonic()
            most = max(most, (used - last) / (now - then))
            last, then = used, now
    except asyncio.CancelledError:
        return most
