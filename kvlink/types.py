# SPDX-License-Identifier: Apache-2.0
"""Values that cross process boundaries or module boundaries. Frozen, comparable, without behaviour or I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvlink.layout import KVLayout

PROTOCOL_VERSION = 2
"""Raised when the meaning of a card, a ticket or a slot changes. Peers compare it before anything else."""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Tells peers whether they share a machine. Two workers share memory only if all but `uid` are equal."""

    boot_id: str
    pid_namespace: int
    net_namespace: int
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class TransportCard:
    """How an owner is reached by one transport. All bytes are opaque to everything but that transport."""

    name: str
    address: bytes
    pool_keys: tuple[bytes, ...] = field(repr=False)
    """Remote key of each pool region, in region order; empty if `refused`."""
    lease_keys: tuple[bytes, ...] = field(repr=False)
    """Remote keys of the lease slots, which peers read, and of the peer words, which they write."""
    refused: str = ""
    """Why this transport cannot lend the pool; the reader shows it in `explain()`."""
    bounces: bool = False
    """What crosses this way to or from the pool, on a GPU, is staged in the worker's host memory."""


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker publishes once when it joins, and readers cache per (worker_id, epoch)."""

    worker_id: str
    epoch: int
    """Grows with every restart of the worker; tickets of older epochs are refused."""
    incarnation: bytes
    """16 random bytes of this process; the same worker re-joining keeps its epoch."""
    agent: str
    """host:port of the worker's WorkerAgent."""
    host: HostIdentity
    layout: KVLayout
    region_bytes: tuple[int, ...]
    """Size of each pool region."""
    transports: tuple[TransportCard, ...]
    """Best first, as the owner ranks them."""
    protocol_version: int = PROTOCOL_VERSION


class ReadyUnit(Enum):
    """What a lease slot's `ready` counts for a streaming pull."""

    BLOCKS = 0
    LAYERS = 1


class LeaseEnd(Enum):
    """How an offer ended."""

    SETTLED = "settled"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """An offer ended: its blocks may be reused from now on."""

    request_id: str
    how: LeaseEnd
    held_s: float


class Joined(Enum):
    """What a watch reports about a worker."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """One entry of a watch. For DOWN the card is the last one known."""

    what: Joined
    card: WorkerCard
