# SPDX-License-Identifier: Apache-2.0
"""Defines values that cross process or module boundaries. They are frozen, comparable, and have no behaviour or I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvlink.layout import KVLayout

PROTOCOL_VERSION = 5
"""Increased when the meaning of a card, a ticket or a slot changes. Peers compare it before anything else."""


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """Identifies the machine and the namespaces of a worker, which tell peers whether they can share memory."""

    boot_id: str
    pid_namespace: int
    net_namespace: int
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class TransportCard:
    """Describes how one transport reaches an owner. Only that transport interprets the bytes."""

    name: str
    address: bytes
    pool_keys: tuple[bytes, ...] = field(repr=False)
    """The remote key of each pool region, in region order. Empty if `refused` is set."""
    lease_keys: tuple[bytes, ...] = field(repr=False)
    """The remote keys of the lease slots, which peers read, and of the peer words, which they write."""
    refused: str = ""
    """The reason why this transport cannot export the pool. The reader shows it in `explain()`."""
    bounces: bool = False
    """Whether transfers to and from the pool, which is on a GPU, are staged in the worker's host memory."""


NEEDS_TLS = 1
"""The flag of a native channel that forbids it: only TLS would do, and the channel has none."""


@dataclass(frozen=True, slots=True)
class NativeChannel:
    """Says how readers without gRPC reach a worker. Who has it may connect."""

    addresses: tuple[str, ...]
    """host:port with numeric hosts, tried in this order."""
    instance: bytes = field(repr=False)
    """Random for each process, 16 bytes. An owner that restarts at the same address has another one."""
    secret: bytes = field(repr=False)
    """Random for each process, 32 bytes."""
    flags: int = 0


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """Describes a worker. The worker publishes it once when it joins, and readers cache it per (worker_id, epoch)."""

    worker_id: str
    epoch: int
    """Grows with every restart of the worker. Tickets of older epochs are refused."""
    incarnation: bytes
    """16 random bytes of this process. A worker that joins again with the same bytes keeps its epoch."""
    agent: str
    """The host:port of the worker's WorkerAgent. Empty for a worker that has only a native channel."""
    host: HostIdentity
    layouts: tuple[KVLayout, ...]
    """The layout of each cache group of the pool."""
    region_bytes: tuple[int, ...]
    """The size of each pool region in bytes."""
    transports: tuple[TransportCard, ...]
    """The worker's transports, best first by its own ranking."""
    protocol_version: int = PROTOCOL_VERSION
    draining: bool = False
    """Whether the worker ends soon and should get no new requests. It still serves its readers."""
    channel: NativeChannel | None = None


class ReadyUnit(Enum):
    """The unit that the `ready` field of a lease slot counts for a streaming pull."""

    BLOCKS = 0
    LAYERS = 1
    TOKENS = 2


class LeaseEnd(Enum):
    """Says how an offer ended."""

    SETTLED = "settled"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """An offer ended, and its blocks may be reused. `held_s` is how long the lease lasted in seconds."""

    request_id: str
    how: LeaseEnd
    held_s: float


class Joined(Enum):
    """The two changes that a watch reports about a worker."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """One entry of a watch. For DOWN, `card` is the last known card."""

    what: Joined
    card: WorkerCard
