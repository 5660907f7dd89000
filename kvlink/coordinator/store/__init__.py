# SPDX-License-Identifier: Apache-2.0
"""Where a coordinator keeps its state. Asynchronous, so that a store may be another machine's."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.rpc.feed import Feed
from kvlink.control.values import Claim, CoordinatorStatus, Offer, SettleOrder, StoreHealth, WorkerChanges
from kvlink.types import WorkerCard

__all__ = ["Store"]


class Store(Protocol):
    """The contract of tests/control/store/. Every call may raise `Refused`; nothing else is expected.

    Lives on one event loop. A Feed that is closed by its consumer, or falls behind, is forgotten. What comes in great
    numbers returns futures, so that many are under way at once and none costs a task that need not wait.
    """

    async def start(self) -> None:
        """Once, before anything else."""

    async def join(self, card: WorkerCard, rejoin: bool) -> int:
        """Admits a process and returns its epoch. Tickets of the worker's lower epochs are gone on return."""

    async def beat(self, worker_id: str, epoch: int) -> bool:
        """Renews a worker's lease. False: it must join again."""

    async def leave(self, worker_id: str, epoch: int) -> None:
        """Removes this life of a worker and what it offered; another life is left alone."""

    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:
        """The card of a joined worker; epoch 0 takes any. Refused: UNKNOWN, RESTARTED."""

    async def workers(self) -> list[WorkerCard]:
        """Everyone who is joined."""

    async def watch(self) -> Feed[WorkerChanges]:
        """First item: everyone who is joined. Then every change, in order."""

    def offer(self, offer: Offer) -> asyncio.Future[None]:
        """Takes a ticket of a joined worker; one that it has, or had and gave out, changes nothing.

        Refused: NOT_JOINED, RESTARTED, MALFORMED, TOO_MANY.
        """

    def claim(self, claim: Claim) -> EagerFuture[list[bytes]]:
        """The tickets once every rank has offered. Cancel it to stop waiting. Refused: EXPIRED, UNKNOWN, TOO_MANY."""

    def give_back(self, claim: Claim) -> None:
        """The reader of an answered claim did not take its tickets: they wait for another claim. Never raises."""

    def settle(self, order: SettleOrder) -> asyncio.Future[None]:
        """Passes an order on to its worker's `orders`. Refused: UNKNOWN, RESTARTED, TOO_MANY."""

    async def orders(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:
        """The settle orders of a joined worker, with those that came before. Ends an earlier feed of it."""

    async def status(self) -> CoordinatorStatus:
        """Counts of this store; `uptime_s` is the caller's business."""

    def health(self) -> StoreHealth:
        """What it cannot do at the moment."""

    async def close(self) -> None:
        """Refuses what waits (NOT_READY) and ends every feed. Idempotent."""
