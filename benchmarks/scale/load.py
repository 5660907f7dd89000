# SPDX-License-Identifier: Apache-2.0
"""The coordinator that is measured, and who loads it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.control import CoordinatorClient, CoordinatorStatus

from ..control import cpu_s
from ..replicas import Replica
from .crowds import Crowds
from .usage import keep_to_last_core, private_bytes


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
