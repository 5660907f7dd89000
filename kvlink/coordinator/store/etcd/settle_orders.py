# SPDX-License-Identifier: Apache-2.0
"""Keeps settle orders in etcd. The coordinator with the worker's keep-alive stream forwards and deletes them."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field

from kvlink.control.codec import StoredRecords
from kvlink.control.limits import Limits
from kvlink.control.rpc.feed import Feed
from kvlink.control.values import SettleOrder
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd.api import delete, leased, put
from kvlink.coordinator.store.etcd.group_commit import GroupCommit
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.membership import Membership
from kvlink.coordinator.store.etcd.mirror import Mirror
from kvlink.runtime.supervised import guarded
from kvlink.v1 import etcd_pb2 as pb


def _retrieve(done: asyncio.Future[pb.TxnResponse]) -> None:
    """Marks an exception as retrieved: an order that stays in etcd is forwarded again, which has no effect."""
    if not done.cancelled():
        done.exception()


class _Orders(Feed[SettleOrder]):
    """Feeds orders to one epoch of a worker. A taken order is deleted from etcd."""

    def __init__(self, epoch: int, limit: int, commits: GroupCommit) -> None:
        super().__init__(limit)
        self.epoch = epoch
        self._keys: deque[bytes] = deque()
        self._commits = commits

    def add(self, key: bytes, order: SettleOrder) -> None:
        if order.epoch == self.epoch and self.put(order):
            self._keys.append(key)

    async def __anext__(self) -> SettleOrder:
        order = await super().__anext__()
        key = self._keys.popleft()
        assert order.epoch == self.epoch
        deleting = self._commits.submit(pb.TxnRequest(success=[delete(key)]), key)
        deleting.add_done_callback(guarded("settle deletions", _retrieve))
        return order


@dataclass(slots=True, eq=False, repr=False)
class SettleOrders:
    """Writes and forwards settle orders. Raises RefusedError, or CoordinatorUnavailable if etcd does not answer."""

    _layout: Keys
    _mirror: Mirror
    _membership: Membership
    _commits: GroupCommit
    _limits: Limits
    _feeds: dict[str, _Orders] = field(default_factory=dict)

    async def settle(self, order: SettleOrder) -> None:
        """Implements Store.settle."""
        member = await self._membership.member(order.worker_id, order.epoch)
        waiting = len(self._mirror.orders.get(order.worker_id, ()))
        if waiting >= self._limits.pending_settles:
            raise refusals.too_many_orders(order.worker_id, waiting)
        key = self._layout.settle_order(order.worker_id, os.urandom(8).hex())
        txn = pb.TxnRequest(
            compare=[leased(self._layout.worker(order.worker_id), member.lease)],
            success=[put(key, StoredRecords.SETTLE.encode(order), member.lease)],
        )
        done = await self._commits.submit(txn, key)
        if not done.succeeded:
            raise refusals.not_joined(order.worker_id)

    async def listen(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:
        """Implements Store.orders."""
        member = await self._membership.own(worker_id, epoch)
        self.stop(worker_id)
        feed = self._feeds[worker_id] = _Orders(
            member.card.epoch, self._limits.pending_settles, self._commits
        )
        for key, order in list(self._mirror.orders.get(worker_id, {}).items()):
            feed.add(key, order)
        return feed

    def forward(self, key: bytes, order: SettleOrder) -> None:
        """Forwards an order to the worker if its keep-alive stream is here."""
        feed = self._feeds.get(order.worker_id)
        if feed is not None:
            feed.add(key, order)

    def stop(self, worker_id: str) -> None:
        """Ends the feed of a worker that is gone, if there is one."""
        feed = self._feeds.pop(worker_id, None)
        if feed is not None:
            feed.drain()
            feed.close()

    def close(self) -> None:
        """Ends every feed. Closing again has no effect."""
        for worker_id in list(self._feeds):
            self.stop(worker_id)
