# SPDX-License-Identifier: Apache-2.0
"""Defines the values of a deployment's overview. protos/kvlink/v1/overview.proto documents their fields."""

from __future__ import annotations

from typing import NamedTuple

MAX_LINKS = 32
MAX_REASONS = 32
MAX_REASON_BYTES = 64
MAX_VIEWS = 1_000
MAX_VIEWED_LINKS = 2_000
"""Bounds the links, and the failures, of all views together, but for one of each worker."""


class LinkReport(NamedTuple):
    """Describes the transfers from the owner `worker_id` to the reporting worker."""

    worker_id: str
    transport: str
    connected: bool = False
    queued: int = 0
    transfers: int = 0
    bytes: int = 0
    failed: int = 0
    stale: int = 0
    p50_s: float = 0.0
    p99_s: float = 0.0


class FailureCount(NamedTuple):
    """Counts failures by `reason`, the name of an exception."""

    reason: str
    number: int


class WorkerReport(NamedTuple):
    """Holds the statistics that a worker sends with its beats."""

    active_leases: int = 0
    oldest_lease_s: float = 0.0
    lease_slots: int = 0
    pinned_blocks: int = 0
    pool_blocks: int = 0
    granted: int = 0
    settled: int = 0
    expired: int = 0
    aborted: int = 0
    fenced_readers: int = 0
    num_links: int = 0
    links: tuple[LinkReport, ...] = ()
    failures: tuple[FailureCount, ...] = ()
    transfers: int = 0
    received_bytes: int = 0


class Beat(NamedTuple):
    """Renews a worker's lease, and carries its latest report."""

    worker_id: str
    epoch: int
    report: WorkerReport | None = None


class WorkerView(NamedTuple):
    """Shows one worker as a coordinator sees it.

    `report` arrived `age_s` seconds ago, and `before` arrived `interval_s` seconds before it.
    """

    worker_id: str
    epoch: int
    agent: str
    pool_bytes: int
    transports: tuple[str, ...]
    report: WorkerReport | None = None
    age_s: float = 0.0
    before: WorkerReport | None = None
    interval_s: float = 0.0
    tenant: str = ""
    """The tenant is empty without TLS, where tenants are not known."""
    draining: bool = False


class CallCount(NamedTuple):
    """Counts the answered calls of one method. Operations in a handoff stream are not counted."""

    method: str
    number: int
    p50_s: float
    p99_s: float


class RefusalCount(NamedTuple):
    """Counts refused calls by method and `reason`, the name of a `refusal.Reason`."""

    method: str
    reason: str
    number: int


class Overview(NamedTuple):
    """Shows one coordinator, its workers and its calls."""

    workers: tuple[WorkerView, ...] = ()
    calls: tuple[CallCount, ...] = ()
    refusals: tuple[RefusalCount, ...] = ()
    feed_lag: int = 0
