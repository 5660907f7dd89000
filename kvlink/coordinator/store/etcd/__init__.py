# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of any number of equal coordinators in etcd.

Each coordinator mirrors all of it in memory through one watch, reads there, and writes by compare-and-set. Nothing is
stored per block.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

from kvlink.control.limits import Limits
from kvlink.control.now import now
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.rpc.feed import Feed
from kvlink.control.security import Trust
from kvlink.control.values import Claim, CoordinatorStatus, Offer, SettleOrder, StoreHealth, WorkerChanges
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.alarm import Alarm
from kvlink.coordinator.store.etcd.api import Etcd, as_refusal, split_url
from kvlink.coordinator.store.etcd.claims import EtcdClaims
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.membership import Membership
from kvlink.coordinator.store.etcd.mirror import Mirror, News
from kvlink.coordinator.store.etcd.offers import EtcdOffers
from kvlink.coordinator.store.etcd.settle_orders import SettleOrders
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.runtime.supervised import for_each, guarded, start_awaited
from kvlink.types import Joined, WorkerCard, WorkerChange

__all__ = ["EtcdStore"]

P = ParamSpec("P")
T = TypeVar("T")

_WATCH_BACKLOG = 1_024
_LOADING_S = 2.5


class EtcdStore:
    """Implements `Store` on etcd. `clock` returns monotonic seconds. Leases of workers go by etcd's clock."""

    def __init__(
        self,
        url: str,
        lease_s: float = 10.0,
        limits: Limits | None = None,
        clock: Callable[[], float] = now,
        tenant: str = "",
        trust: Trust | None = None,
    ) -> None:
        """`url` has the form that `kvlink coordinator --store` takes; Etcd documents `trust`. Raises ConfigError."""
        addresses, fleet = split_url(url)
        limits, layout = limits or Limits(), Keys(fleet, tenant)
        self._clock = clock
        self._etcd = etcd = Etcd(addresses, trust, clock)
        self._mirror = mirror = Mirror(layout, limits)
        self._sync = sync = Sync(etcd, layout, mirror, self._take_news, self._is_awaited, clock)
        self._commits = commits = GroupCommit(etcd, sync.written)
        self._members = members = Membership(etcd, layout, mirror, sync, lease_s, limits)
        self._offers = EtcdOffers(layout, mirror, sync, members, commits, limits)
        self._claims = EtcdClaims(etcd, layout, mirror, sync, commits, limits)
        self._settle_orders = SettleOrders(layout, mirror, members, commits, limits)
        self._num_joined = self._num_offered = self._num_settle_orders = 0
        self._watchers: dict[Feed[WorkerChanges], None] = {}
        self._pending: set[asyncio.Task[Any]] = set()
        self._alarm = Alarm(self._ring, clock)
        self._closed = False
        etcd.health.on_doubt = self._arm

    async def start(self) -> None:
        """Returns when etcd has been read, or after 2.5 s. Until it has been read, calls are refused (NOT_READY)."""
        self._sync.start()
        with contextlib.suppress(RefusedError):
            await self._wait_for_state(_LOADING_S)

    async def join(self, card: WorkerCard, rejoin: bool) -> int:
        epoch = await self._guarded(self._members.join, card, rejoin)
        self._num_joined += 1
        return epoch

    async def beat(self, worker_id: str, epoch: int) -> bool:
        return await self._guarded(self._members.beat, worker_id, epoch)

    async def leave(self, worker_id: str, epoch: int) -> None:
        await self._guarded(self._members.leave, worker_id, epoch)

    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:
        return (await self._guarded(self._members.member, worker_id, epoch)).card

    async def check_own(self, worker_id: str, epoch: int) -> None:
        await self._guarded(self._members.own, worker_id, epoch)

    async def workers(self) -> list[WorkerCard]:
        await self._guarded(_nothing)
        return [member.card for member in self._mirror.members.values()]

    async def watch(self) -> Feed[WorkerChanges]:
        cards = await self.workers()
        self._check_not_lost()
        feed: Feed[WorkerChanges] = Feed(_WATCH_BACKLOG, lambda: self._watchers.pop(feed, None))
        feed.put([WorkerChange(Joined.UP, card) for card in cards])
        self._watchers[feed] = None
        return feed

    def offer(self, offer: Offer) -> asyncio.Future[None]:
        return self._try_begin(self._offer, offer)

    async def _offer(self, offer: Offer) -> None:
        await self._offers.offer(offer)
        self._num_offered += 1

    def claim(self, claim: Claim) -> EagerFuture[list[bytes]]:
        answer: EagerFuture[list[bytes]] = EagerFuture()
        try:
            if self._closed:
                raise refusals.closing()
            self._check_not_lost()
            self._claims.claim(claim, answer, self._clock())
        except RefusedError as refused:
            answer.set_exception(refused)
        self._arm()
        return answer

    def release(self, claim: Claim) -> None:
        self._try_begin(self._claims.release, claim)

    def settle(self, order: SettleOrder) -> asyncio.Future[None]:
        return self._try_begin(self._settle, order)

    async def _settle(self, order: SettleOrder) -> None:
        await self._settle_orders.settle(order)
        self._num_settle_orders += 1

    async def orders(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:
        return await self._guarded(self._settle_orders.listen, worker_id, epoch)

    async def status(self) -> CoordinatorStatus:
        return CoordinatorStatus(
            workers=len(self._mirror.members),
            tickets=self._mirror.num_free,
            waiting_claims=len(self._claims),
            joined=self._num_joined,
            lost_workers=self._mirror.num_lost,
            offered=self._num_offered,
            claimed=self._claims.num_claimed,
            expired=self._mirror.num_expired,
            settle_orders=self._num_settle_orders,
            draining=sum(member.card.draining for member in self._mirror.members.values()),
        )

    def health(self) -> StoreHealth:
        return self._etcd.health.report()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._alarm.close()
        await self._claims.close()
        for feed in list(self._watchers):
            feed.close()
        self._settle_orders.close()
        for task in list(self._pending):
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        await self._sync.close()
        await self._commits.close()
        await self._members.close()
        await self._etcd.close()

    def tick(self) -> None:
        """Expires everything that is due by the clock. A timer runs it."""
        if self._etcd.health.expire():
            self._refuse_waiting()
        self._offers.collect(self._clock())
        self._claims.expire(self._clock())

    def _ring(self, late_s: float) -> float:
        self.tick()
        return self._next_deadline()

    def _next_deadline(self) -> float:
        return min(
            self._mirror.due.next(),
            self._offers.next_deadline(),
            self._claims.next_deadline(),
            self._etcd.health.next_deadline(),
        )

    def _arm(self) -> None:
        self._alarm.set(self._next_deadline())

    def _refuse_waiting(self) -> None:
        """Ends claims and watches that could only be answered from a mirror that is too old."""
        why = refusals.store_is_lost(repr(self._etcd))
        self._claims.refuse_all(why)
        for feed in list(self._watchers):
            feed.close(RefusedError(why.reason, why.sentence))

    def _check_not_lost(self) -> None:
        if self._etcd.health.is_lost:
            raise refusals.store_is_lost(repr(self._etcd))

    def _is_awaited(self) -> bool:
        return bool(self._watchers) or len(self._claims) > 0

    def _take_news(self, news: News) -> None:
        for feed in list(self._watchers) if news.workers else ():
            if not feed.put(news.workers):
                feed.close(refusals.watch_fell_behind())
        gone = [change.card.worker_id for change in news.workers if change.what is Joined.DOWN]
        for_each("etcd watch", self._settle_orders.stop, gone)
        for_each("etcd watch", lambda order: self._settle_orders.forward(*order), news.orders)
        for_each("etcd watch", self._claims.serve_waiters, news.requests)
        self._arm()

    async def _guarded(self, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a call when the state has been read. Raises RefusedError and nothing else."""
        try:
            if not self._sync.loaded.is_set():
                await self._wait_for_state(_LOADING_S / 5)
            return await call(*args, **kwargs)
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise refusals.closing() from None
        except Exception as error:
            raise (refusals.closing() if self._closed else as_refusal(error)) from None

    async def _wait_for_state(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._sync.loaded.wait(), timeout_s)
        except asyncio.TimeoutError:
            raise RefusedError(
                Reason.NOT_READY,
                f"the coordinator has not yet read its store, {self._etcd!r}: it is not running or too slow; retry",
            ) from None

    def _try_begin(self, call: Callable[[T], Awaitable[None]], value: T) -> asyncio.Task[None]:
        task = start_awaited(self._guarded(call, value))
        self._pending.add(task)
        task.add_done_callback(guarded("etcd calls", self._note_end))
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._pending.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved, or asyncio logs it when the client's stream ended first


async def _nothing() -> None:
    pass
