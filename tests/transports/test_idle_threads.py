# SPDX-License-Identifier: Apache-2.0
"""Threads of idle workers sleep until there is work."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from transports.pairs import Pair
from transports.processes import eventually

NewPair = Callable[..., Pair]

_OWN = ("kvlink-progress", "kvlink-owner")
_SLEEP_S = 1.5


def wake_ups() -> dict[str, int]:
    """Returns how often each thread of this process gave up the CPU by itself. Only those of C++."""
    counts = {}
    for task in Path("/proc/self/task").iterdir():
        about = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        if about["Name"].startswith(_OWN):
            counts[task.name] = int(about["voluntary_ctxt_switches"])
    return counts


def test_threads_of_connected_workers_without_work_sleep(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport)
    pair.works()

    def sleep() -> bool:
        before = wake_ups()
        time.sleep(_SLEEP_S)
        return before == wake_ups()

    eventually(sleep)
    pair.works()
