# SPDX-License-Identifier: Apache-2.0
"""Makes a store from its name. This is the only place that names the stores."""

from __future__ import annotations

from collections.abc import Callable

from kvlink.control.limits import Limits
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.etcd.api import split_url
from kvlink.coordinator.store.memory import MemoryStore

MEMORY = "memory"


def store_maker(name: str, lease_s: float = 10.0, limits: Limits | None = None) -> Callable[[str], Store]:
    """Returns a function that makes the store of a tenant. Raises ConfigError for an unknown name.

    `name` is "memory" or "etcd://host:2379,host2:2379/fleet".
    """
    if name == MEMORY:
        return lambda tenant: MemoryStore(lease_s, limits)
    split_url(name)
    return lambda tenant: EtcdStore(name, lease_s, limits, tenant=tenant)
