# SPDX-License-Identifier: Apache-2.0
"""Holds the coordinator that is measured, its load, and what the kernel counts of a process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlink.control import CoordinatorClient, CoordinatorStatus

from ..measurements.control import cpu_s
from ..measurements.coordinator_replicas import Replica
from .crowd import Crowds


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


_CALM_S = 0.2
_CALM_SHARE = 0.05
"""The share of a core below which it counts as idle."""
_DONE_WITHIN_S = 60.0


@dataclass(frozen=True)
class Load:
    """A coordinator and its load. It belongs to the thread that made it."""

    coordinator: Replica
    other: Replica
    """The replica that serves the same store if there are several, else the same as `coordinator`."""
    crowds: Crowds
    store_pids: Sequence[int] = ()
    """The process ids of etcd's members, if that is the store."""

    def cpu_s(self) -> float:
        """Returns the CPU time so far of all threads of the coordinator."""
        return cpu_s(self.coordinator.process.pid)

    def cpu_s_when_done(self) -> float:
        """Returns `cpu_s` once the coordinator is nearly idle, so that it includes everything requested."""
        used_s, give_up = self.cpu_s(), time.monotonic() + _DONE_WITHIN_S
        while time.monotonic() < give_up:
            before_s = used_s
            time.sleep(_CALM_S)
            used_s = self.cpu_s()
            if used_s - before_s < _CALM_SHARE * _CALM_S:
                break
        return used_s

    def store_cpu_s(self) -> float:
        """Returns the CPU time so far of all etcd members."""
        return sum(map(cpu_s, self.store_pids))

    def private_mib(self) -> float:
        """Returns the memory of the coordinator alone."""
        return private_bytes(self.coordinator.process.pid) / 2**20

    def lose_coordinator(self) -> None:
        """Kills the coordinator. Returns once another one listens in its place."""
        self.coordinator.kill()
        self.coordinator.start()
        keep_to_last_core(self.coordinator.process.pid)

    def status(self) -> CoordinatorStatus:
        """Returns the coordinator's counts."""

        async def ask() -> CoordinatorStatus:
            async with CoordinatorClient(self.coordinator.address) as client:
                return await client.status()

        return asyncio.run(ask())
