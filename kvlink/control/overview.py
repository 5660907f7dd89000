# SPDX-License-Identifier: Apache-2.0
"""What people are shown of a deployment, as values: see protos/kvlink/v1/overview.proto for what the fields mean."""

from __future__ import annotations

from typing import NamedTuple

MAX_LINKS = 32
MAX_REASONS = 32
MAX_REASON_BYTES = 64
MAX_VIEWS = 1_000
MAX_VIEWED_LINKS = 2_000
"""A few ten milliseconds of the coordinator's only thread."""


class LinkReport(NamedTuple):
    """From the owner `worker_id` to the worker that reports."""

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
    """`reason` is the name of an exception."""

    reason: str
    number: int


class WorkerReport(NamedTuple):
    """What a worker tells with its beats."""

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
    """A sign of life."""

    worker_id: str
    epoch: int
    report: WorkerReport | None = None


class WorkerView(NamedTuple):
    """One worker as a coordinator sees it. `before` came `interval_s` before `report`, which came `age_s` ago."""

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
    """"" where nobody knows who is whose."""


class CallCount(NamedTuple):
    """Answered calls of one method; in a handoff stream none is counted."""

    method: str
    number: int
    p50_s: float
    p99_s: float


class RefusalCount(NamedTuple):
    """`reason` names a `refusal.Reason`."""

    method: str
    reason: str
    number: int


class Overview(NamedTuple):
    """Of one coordinator."""

    workers: tuple[WorkerView, ...] = ()
    calls: tuple[CallCount, ...] = ()
    refusals: tuple[RefusalCount, ...] = ()
    feed_lag: int = 0
