# SPDX-License-Identifier: Apache-2.0
"""Keeps the state of a single coordinator in memory: Members and PendingOffers, which are pure, and a timer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvlink.control.limits import Limits
from kvlink.control.now import now
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.rpc.feed import Feed
from kvlink.control.values import Claim, CoordinatorStatus, Offer, SettleOrder, StoreHealth, WorkerChanges
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.alarm import Alarm
from kvlink.coordinator.store.members import Members
from kvlink.coordinator.store.pending_offers import Answer, PendingOffers
from kvlink.runtime.supervised import for_each
from kvlink.types import Joined, WorkerCard, WorkerChange

_WATCH_BACKLOG = 1_024
"""A watcher may lag behind by this many changes. Then its stream ends, and it starts again with the whole list."""
_STALL_S = 1.0

_log = logging.getLogger("kvlink.control")


class MemoryStore:
    """Implements `Store` in memory. `clock` returns monotonic seconds. A timer runs `tick` when something is due."""

    def __init__(
        self, lease_s: float = 10.0, limits: Limits | None = None, clock: Callable[[], float] = now
    ) -> None:
        self._limits = limits or Limits()
        self._clock = clock
        self._members = Members(lease_s, self._limits)
        self._offers: PendingOffers[EagerFuture[list[bytes]]] = PendingOffers(self._limits)
        self._num_joined = self._num_lost = self._num_offered = self._num_settle_orders = 0
        self._watchers: dict[Feed[WorkerChanges], None] = {}
        self._orders: dict[str, tuple[int, Feed[SettleOrder]]] = {}
        self._alarm = Alarm(self._ring, clock)
        self._closed = False
        self._done: asyncio.Future[None]
        """One done future is shared by all operations that succeed, because there are many."""

    async def start(self) -> None:  # noqa: D102
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self._done.set_result(None)

    async def join(self, card: WorkerCard, rejoin: bool) -> int:  # noqa: D102
        epoch, changes = self._members.join(card, rejoin, self._clock())
        self._num_joined += 1
        for change in changes:
            if change.what is Joined.DOWN:
                self._forget(change.card, refusals.has_restarted(card.worker_id, epoch))
        self._publish(changes)
        self._alarm.set(self._members.next_deadline())
        return epoch

    async def beat(self, worker_id: str, epoch: int) -> bool:  # noqa: D102
        return self._members.beat(worker_id, epoch, self._clock())

    async def leave(self, worker_id: str, epoch: int) -> None:  # noqa: D102
        changes = self._members.leave(worker_id, epoch)
        for change in changes:
            self._forget(change.card, refusals.has_left(worker_id))
        self._publish(changes)

    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:  # noqa: D102
        return self._members.card(worker_id, epoch)

    async def check_own(self, worker_id: str, epoch: int) -> None:  # noqa: D102
        self._check_own(worker_id, epoch)

    async def workers(self) -> list[WorkerCard]:  # noqa: D102
        return list(self._members.cards())

    async def watch(self) -> Feed[WorkerChanges]:  # noqa: D102
        feed: Feed[WorkerChanges] = Feed(_WATCH_BACKLOG, lambda: self._watchers.pop(feed, None))
        feed.put([WorkerChange(Joined.UP, card) for card in self._members.cards()])
        self._watchers[feed] = None
        return feed

    def offer(self, offer: Offer) -> asyncio.Future[None]:  # noqa: D102
        try:
            self._check_own(offer.worker_id, offer.epoch)
            now = self._clock()
            answers = self._offers.offer(offer, now)
        except RefusedError as refused:
            return _failed(refused)
        self._num_offered += 1
        if answers:
            self._answer(answers)
        self._alarm.set(now + offer.ttl_s)
        return self._done

    def claim(self, claim: Claim) -> EagerFuture[list[bytes]]:  # noqa: D102
        answer: EagerFuture[list[bytes]] = EagerFuture(loop=self._loop)
        try:
            tickets = self._offers.take(claim)
            if tickets is None:
                self._wait(claim, answer)
            else:
                answer.set_result(tickets)
        except RefusedError as refused:
            answer.set_exception(refused)
        return answer

    def _wait(self, claim: Claim, answer: EagerFuture[list[bytes]]) -> None:
        if self._closed:
            raise refusals.closing()
        due = self._clock() + claim.timeout_s
        self._offers.waiting.add(claim, answer, due)
        answer.on_cancel = self._offers.waiting.remove
        self._alarm.set(due)

    def release(self, claim: Claim) -> None:  # noqa: D102
        self._answer(self._offers.release(claim, self._clock(), self._members.runs))
        self._alarm.set(self._offers.next_deadline())

    def settle(self, order: SettleOrder) -> asyncio.Future[None]:  # noqa: D102
        try:
            self._members.card(order.worker_id, order.epoch)
            if not self._orders_of(order.worker_id, order.epoch).put(order):
                raise refusals.too_many_orders(order.worker_id, self._limits.pending_settles)
        except RefusedError as refused:
            return _failed(refused)
        self._num_settle_orders += 1
        return self._done

    async def orders(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:  # noqa: D102
        self._members.card(worker_id, epoch)
        self._members.check_caller(worker_id)
        last = self._orders_of(worker_id, epoch)
        queued = last.drain()
        last.close()
        feed = self._orders_of(worker_id, epoch)
        for order in queued:
            feed.put(order)
        return feed

    async def status(self) -> CoordinatorStatus:  # noqa: D102
        return CoordinatorStatus(
            workers=len(self._members),
            tickets=self._offers.num_tickets,
            waiting_claims=len(self._offers.waiting),
            joined=self._num_joined,
            lost_workers=self._num_lost,
            offered=self._num_offered,
            claimed=self._offers.num_claimed,
            expired=self._offers.num_expired,
            settle_orders=self._num_settle_orders,
            draining=sum(card.draining for card in self._members.cards()),
        )

    def health(self) -> StoreHealth:  # noqa: D102
        return StoreHealth()

    async def close(self) -> None:  # noqa: D102
        self._closed = True
        self._alarm.close()
        for waiter in self._offers.waiting.all():
            self._offers.waiting.remove(waiter)
            waiter.set_exception(refusals.closing())
        for watcher in list(self._watchers):
            watcher.close()
        for _, feed in list(self._orders.values()):
            feed.close()

    def tick(self, late_s: float = 0.0) -> None:
        """Expires everything that is due by the clock and was due `late_s` seconds ago."""
        now = self._clock()
        changes = self._members.expire(now, late_s)
        self._num_lost += len(changes)
        for_each("store timer", self._forget_lost, changes)
        self._publish(changes)
        self._answer(self._offers.expire(now))

    def _ring(self, late_s: float) -> float:
        if late_s > _STALL_S:
            _log.warning(
                "this coordinator did not run, due workers get the time of one more beat seconds=%.1f", late_s
            )
        self.tick(late_s)
        return min(self._members.next_deadline(), self._offers.next_deadline())

    def _answer(self, answers: Iterable[Answer[EagerFuture[list[bytes]]]]) -> None:
        for_each("store timer", _tell, answers)

    def _publish(self, changes: WorkerChanges) -> None:
        for watcher in list(self._watchers) if changes else ():
            if not watcher.put(changes):
                watcher.close(refusals.watch_fell_behind())

    def _forget_lost(self, change: WorkerChange) -> None:
        self._forget(change.card, refusals.stopped_beating(change.card.worker_id))

    def _forget(self, card: WorkerCard, why: str) -> None:
        self._offers.drop_worker(card.worker_id, why)
        self._alarm.set(self._offers.next_deadline())
        if card.worker_id in self._orders:
            self._orders[card.worker_id][1].close()

    def _orders_of(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:
        known_epoch, known = self._orders.get(worker_id, (0, None))
        if known is not None and known_epoch == epoch:
            return known

        def forget() -> None:
            if self._orders.get(worker_id, (0, None))[1] is feed:
                del self._orders[worker_id]

        feed: Feed[SettleOrder] = Feed(self._limits.pending_settles, forget)
        self._orders[worker_id] = (epoch, feed)
        return feed

    def _check_own(self, worker_id: str, epoch: int) -> None:
        if not self._members.runs(worker_id, epoch):
            raise self._not_running(worker_id, epoch)
        self._members.check_caller(worker_id)

    def _not_running(self, worker_id: str, epoch: int) -> RefusedError:
        try:
            running = self._members.card(worker_id, 0).epoch
        except RefusedError as unknown:
            return RefusedError(Reason.NOT_JOINED, unknown.sentence)
        return refusals.restarted(worker_id, epoch, running)


def _tell(answer: Answer[EagerFuture[list[bytes]]]) -> None:
    waiter, tickets, refused = answer
    if refused is None:
        waiter.set_result(tickets)
    else:
        waiter.set_exception(refused)


def _failed(refused: RefusedError) -> asyncio.Future[None]:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(refused)
    return failed
