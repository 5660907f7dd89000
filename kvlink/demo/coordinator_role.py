# SPDX-License-Identifier: Apache-2.0
"""Runs the coordinator of `kvlink coordinator` on its own event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvlink.coordinator.coordinator import Coordinator
from kvlink.demo.messages import Reply
from kvlink.runtime.background import ControlThread


class CoordinatorRole:
    """Serves from construction until `close`."""

    def __init__(self) -> None:
        self._thread = ControlThread("coordinator")
        self._coordinator = Coordinator()
        self._address = self._thread.run(self._coordinator.start())

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"address": lambda: {"address": self._address}}

    def close(self) -> None:
        """Implements Role."""
        self._thread.close()
