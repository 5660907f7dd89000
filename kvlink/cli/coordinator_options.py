# SPDX-License-Identifier: Apache-2.0
"""Finds the coordinator that a command asks."""

from __future__ import annotations

from kvlink.config import WorkerConfig
from kvlink.coordinator.coordinator import DEFAULT_PORT


def address_of(given: str) -> str:
    """Returns `given`, else KVLINK_COORDINATOR, else the default port on this host."""
    return given or WorkerConfig.from_env().coordinator or f"127.0.0.1:{DEFAULT_PORT}"
