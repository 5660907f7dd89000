# SPDX-License-Identifier: Apache-2.0
"""The coordinator that is measured, and who loads it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.control import CoordinatorClient, CoordinatorStatus

from ..measurements.control import cpu_s
from ..measurements.coordinator_replicas import Replica
from .crowds import Crowds
from .usage import keep_to_last_core, private_bytes

_CALM_S = 0.2
_CALM_SHARE = 0.05
"""Of a core."""
_DONE_WITHIN_S = 60.0


@dataclass(frozen=True)
class Load:
    """Belongs to the thread that made it."""

    coordinator: Replica
    other: Replica
    """Serves the same store where there are several, else the same as `coordinator`."""
    crowds: Crowds
    store_pids: Sequence[int] = ()
    """Of etcd's members, where that is the store."""

    def cpu_s(self) -> float:
        """Of the coordinator, all threads, so far."""
        return cpu_s(self.coordinator.process.pid)

    def cpu_s_when_done(self) -> float:
        """As `cpu_s`, once there is next to nothing to do: of what was asked, all counts."""
        used_s, give_up = self.cpu_s(), time.monotonic() + _DONE_WITHIN_S
        while time.monotonic() < give_up:
            before_s = used_s
            time.sleep(_CALM_S)
            used_s = self.cpu_s()
            if used_s - before_s < _CALM_SHARE * _CALM_S:
                break
        return used_s

    def store_cpu_s(self) -> float:
        """Of etcd's members together, so far."""
        return sum(map(cpu_s, self.store_pids))

    def private_mib(self) -> float:
        """Memory of the coordinator alone."""
        return private_bytes(self.coordinator.process.pid) / 2**20

    def lose_coordinator(self) -> None:
        """Kills it, and returns when another listens in its place."""
        self.coordinator.kill()
        self.coordinator.start()
        keep_to_last_core(self.coordinator.process.pid)

    def status(self) -> CoordinatorStatus:
        """What it counts."""

        async def ask() -> CoordinatorStatus:
            async with CoordinatorClient(self.coordinator.address) as client:
                return await client.status()

        return asyncio.run(ask())
