# SPDX-License-Identifier: Apache-2.0
"""kvlink moves the KV cache of a running request between inference workers by one-sided reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvlink.config import WorkerConfig
    from kvlink.decode import Pull, PullStats
    from kvlink.explain import PathTaken
    from kvlink.layout import KVLayout
    from kvlink.pool import BlockPool
    from kvlink.ticket import Ticket
    from kvlink.types import LeaseEnd, LeaseEvent, ReadyUnit
    from kvlink.worker import Worker

_HOMES = {
    "BlockPool": "pool",
    "KVLayout": "layout",
    "LeaseEnd": "types",
    "LeaseEvent": "types",
    "PathTaken": "explain",
    "Pull": "decode",
    "PullStats": "decode",
    "ReadyUnit": "types",
    "Ticket": "ticket",
    "Worker": "worker",
    "WorkerConfig": "config",
}

__all__ = [
    "BlockPool",
    "KVLayout",
    "LeaseEnd",
    "LeaseEvent",
    "PathTaken",
    "Pull",
    "PullStats",
    "ReadyUnit",
    "Ticket",
    "Worker",
    "WorkerConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Loads names on first use, so that `import kvlink` costs nothing and the coordinator needs no extension."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvlink' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"kvlink.{home}"), name)
    except ModuleNotFoundError as error:
        if error.name != "kvlink._core":
            raise
        raise ImportError(
            "kvlink's native part is not built here; run `pip install -e .` in a checkout, or import the installed "
            "package from another folder"
        ) from None
