# SPDX-License-Identifier: Apache-2.0
"""Stores to test, each on a stage that decides how time passes. A new store adds its stage to `STAGES`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import pytest
from control.fake_etcd import FakeEtcd

from kvlink.control.limits import Limits
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.values import Claim
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.memory import MemoryStore

T = TypeVar("T")
LEASE_S = 10.0
LIMITS = Limits(
    workers=3, card_bytes=90_000, tickets=6, tickets_per_worker=4, waiting_claims=2, pending_settles=2
)


class Stage(Protocol):
    store: Store

    async def pass_time(self, seconds: float) -> None: ...


@dataclass
class MemoryStage:
    now: float = 1_000.0

    def __post_init__(self) -> None:
        self.store = MemoryStore(LEASE_S, LIMITS, lambda: self.now)

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.tick()
        await asyncio.sleep(0)


@dataclass
class EtcdStage:
    """All by a clock of its own. Leases of workers, long ones for etcd, are ended when they are due by it."""

    url: str
    trust: Any = None
    now: float = 1_000.0

    def __post_init__(self) -> None:
        self.store = EtcdStore(self.url, 600.0, LIMITS, lambda: self.now, trust=self.trust)
        self._due: dict[int, float] = {}
        etcd = self.store._etcd
        grant, keep_alive = etcd.grant, etcd.keep_alive

        async def granted(ttl_s: int) -> int:
            return self._begun(await grant(ttl_s))

        async def kept_alive(leases: Iterable[int]) -> set[int]:
            return set(map(self._begun, await keep_alive(leases)))

        etcd.grant, etcd.keep_alive = granted, kept_alive

    def _begun(self, lease: int) -> int:
        self._due[lease] = self.now + LEASE_S
        return lease

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.tick()
        for lease in [lease for lease, due in self._due.items() if due <= self.now]:
            del self._due[lease]
            await self.store._members._end(lease)


_fleets = itertools.count()


def memory_stage(_: pytest.FixtureRequest) -> Stage:
    return MemoryStage()


def etcd_stage(request: pytest.FixtureRequest) -> Stage:
    etcd = request.getfixturevalue("etcd")
    return EtcdStage(f"etcd://{etcd.addresses}/fleet-{next(_fleets)}")


def fake_stage(_: pytest.FixtureRequest) -> Stage:
    """In the gate, which has no real etcd."""
    return EtcdStage("etcd://127.0.0.1:1/fleet", FakeEtcd())


STAGES: dict[str, Callable[[pytest.FixtureRequest], Stage]] = {
    "memory": memory_stage,
    "etcd": etcd_stage,
    "fake": fake_stage,
}


async def refused(call: Awaitable[object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await call
    return caught.value


async def gone(store: Store, claim: Claim) -> bool:
    """Whether nothing can be claimed now."""
    return (await refused(store.claim(claim))).reason is Reason.UNKNOWN


async def started(call: asyncio.Future[T]) -> asyncio.Future[T]:
    await asyncio.sleep(0)
    assert not call.done()
    return call
