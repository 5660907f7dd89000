# SPDX-License-Identifier: Apache-2.0
"""From what an operator writes to a store: the one place that names them."""

from __future__ import annotations

from collections.abc import Callable

from kvlink.control.limits import Limits
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.etcd.api import split_url
from kvlink.coordinator.store.memory import MemoryStore

MEMORY = "memory"


def store_maker(name: str, lease_s: float = 10.0, limits: Limits | None = None) -> Callable[[str], Store]:
    """`name` is "memory" or "etcd://host:2379,host2:2379/fleet". Makes a store for a tenant. Raises ConfigError."""
    if name == MEMORY:
        return lambda tenant: MemoryStore(lease_s, limits)
    split_url(name)
    return lambda tenant: EtcdStore(name, lease_s, limits, tenant=tenant)
