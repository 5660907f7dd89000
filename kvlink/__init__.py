# SPDX-License-Identifier: Apache-2.0
"""kvlink moves the KV cache of running requests between inference workers.

    layout = kvlink.dense(kvlink.Geometry(num_layers=32, total_heads=8,
                                          row_bytes=256, num_blocks=4096))
    pool = kvlink.BlockPool.allocate(layout)    # or .from_tensors(...)
    worker = kvlink.Worker(pool, "prefill-0")

    ticket = worker.offer("request-42", block_ids)          # prefill
    worker.pull(ticket, into=block_ids).wait()              # decode

Worker, WorkerConfig,         a member of the deployment, its options, and
  Termination                 SIGTERM to drain it
BlockPool                     the memory that it registers and pulls into
dense, Geometry, KVLayout,    where blocks, heads and tokens are, and
  Order, Regions, Pipeline, Context     which of them a rank has
Ticket, ReadyUnit             what a reader needs to pull one request
LeaseEvent, LeaseEnd          the end of an offer: its blocks are free
Pull, PullStats, PathTaken,   a running pull, its statistics, its path, and
  PreparedPull                one that is repeated
SharedPrefix, PrefixChoice,   a prefix in a peer's cache (digest_prefixes),
  PrefillRate, PrefillMeter   and whether to pull it (pull_or_compute)
Relay, broadcast_parents      one request for many workers
KVLinkError and below         every exception of kvlink, in `kvlink.errors`

Options are KVLINK_* variables: `kvlink config` lists them. `kvlink doctor`
checks this machine. Other modules may change from version to version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kvlink import errors
    from kvlink.config import WorkerConfig
    from kvlink.errors import (
        AccessDenied,
        Cancelled,
        ConfigError,
        CoordinatorError,
        CoordinatorUnavailable,
        KVLinkError,
        LayoutMismatch,
        LeaseExpired,
        PeerUnreachable,
        StaleBlocks,
        StaleReason,
        TransferError,
        TransferTimeout,
        TransportUnavailable,
        UnknownRequest,
    )
    from kvlink.layout import Context, Geometry, KVLayout, Order, Pipeline, Regions, dense
    from kvlink.ticket import Ticket
    from kvlink.ticket.prefix_digests import digest_prefixes
    from kvlink.transfer.explain import PathTaken
    from kvlink.transfer.pool import BlockPool
    from kvlink.transfer.pull import Pull, PullStats
    from kvlink.types import LeaseEnd, LeaseEvent, ReadyUnit
    from kvlink.worker import Worker
    from kvlink.worker.broadcast import broadcast_parents
    from kvlink.worker.prefix_choice import PrefillMeter, PrefillRate, PrefixChoice, pull_or_compute
    from kvlink.worker.prefixes import SharedPrefix
    from kvlink.worker.prepared import PreparedPull
    from kvlink.worker.relay import Relay
    from kvlink.worker.termination import Termination

__all__ = [
    "AccessDenied",
    "BlockPool",
    "Cancelled",
    "ConfigError",
    "Context",
    "CoordinatorError",
    "CoordinatorUnavailable",
    "Geometry",
    "KVLayout",
    "KVLinkError",
    "LayoutMismatch",
    "LeaseEnd",
    "LeaseEvent",
    "LeaseExpired",
    "Order",
    "PathTaken",
    "PeerUnreachable",
    "Pipeline",
    "PrefillMeter",
    "PrefillRate",
    "PrefixChoice",
    "PreparedPull",
    "Pull",
    "PullStats",
    "ReadyUnit",
    "Regions",
    "Relay",
    "SharedPrefix",
    "StaleBlocks",
    "StaleReason",
    "Termination",
    "Ticket",
    "TransferError",
    "TransferTimeout",
    "TransportUnavailable",
    "UnknownRequest",
    "Worker",
    "WorkerConfig",
    "__version__",
    "broadcast_parents",
    "dense",
    "digest_prefixes",
    "errors",
    "pull_or_compute",
]

_HOMES = {
    "config": ("WorkerConfig",),
    "transfer.pull": ("Pull", "PullStats"),
    "transfer.explain": ("PathTaken",),
    "layout": ("Context", "Geometry", "KVLayout", "Order", "Pipeline", "Regions", "dense"),
    "transfer.pool": ("BlockPool",),
    "ticket.prefix_digests": ("digest_prefixes",),
    "ticket": ("Ticket",),
    "types": ("LeaseEnd", "LeaseEvent", "ReadyUnit"),
    "worker": ("Worker",),
    "worker.prefix_choice": ("PrefillMeter", "PrefillRate", "PrefixChoice", "pull_or_compute"),
    "worker.prefixes": ("SharedPrefix",),
    "worker.prepared": ("PreparedPull",),
    "worker.relay": ("Relay",),
    "worker.termination": ("Termination",),
    "worker.broadcast": ("broadcast_parents",),
}
"""Maps each module to the public names that it defines. Every other name of `__all__` is in `errors`."""


def __dir__() -> list[str]:
    """Returns the public names, without the modules that happen to be loaded."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """Loads names on first use, so that `import kvlink` costs nothing and the coordinator needs no extension."""
    if name not in __all__:
        raise AttributeError(f"module 'kvlink' has no attribute {name!r}")
    from importlib import import_module

    home = next((home for home, names in _HOMES.items() if name in names), "errors")
    try:
        module = import_module(f"kvlink.{home}")
    except ModuleNotFoundError as error:
        if error.name != "kvlink._core._core":
            raise
        raise ImportError(
            "kvlink's native part is not built here; run `pip install -e .` in a checkout, or import the installed "
            "package from another directory"
        ) from None
    return module if name == home else getattr(module, name)
