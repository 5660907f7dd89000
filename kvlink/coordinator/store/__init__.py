# SPDX-License-Identifier: Apache-2.0
"""Defines the store of a coordinator's state. It is asynchronous, so that a store may be on another machine."""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.rpc.feed import Feed
from kvlink.control.values import Claim, CoordinatorStatus, Offer, SettleOrder, StoreHealth, WorkerChanges
from kvlink.types import WorkerCard

__all__ = ["Store"]


class Store(Protocol):
    """Keeps workers, tickets, claims and settle orders. tests/control/store/ tests this contract.

    Every call may raise `RefusedError` and nothing else. A store belongs to one event loop. It drops a Feed that its
    consumer closes or that falls behind. Frequent operations return futures, so that many run at once without tasks.
    What a worker does itself (`join`, `beat`, `leave`, `check_own`, `offer`, `orders`) is refused to other processes
    (DENIED), which `is_caller` tells apart.
    """

    async def start(self) -> None:
        """Starts the store. Call it once, before anything else."""

    async def join(self, card: WorkerCard, rejoin: bool) -> int:
        """Admits a process and returns its epoch. On return, tickets of the worker's lower epochs are removed."""

    async def beat(self, worker_id: str, epoch: int) -> bool:
        """Renews a worker's lease. Returns False if the worker must join again."""

    async def leave(self, worker_id: str, epoch: int) -> None:
        """Removes this epoch of a worker and its offers. Another epoch is left alone."""

    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:
        """Returns the card of a joined worker. Epoch 0 accepts any epoch. RefusedError: UNKNOWN, RESTARTED."""

    async def check_own(self, worker_id: str, epoch: int) -> None:
        """Returns if the caller is this epoch of a joined worker. RefusedError: NOT_JOINED, RESTARTED."""

    async def workers(self) -> list[WorkerCard]:
        """Returns the cards of all joined workers."""

    async def watch(self) -> Feed[WorkerChanges]:
        """Returns a feed whose first item is all joined workers, followed by every change in order."""

    def offer(self, offer: Offer) -> asyncio.Future[None]:
        """Stores a ticket of a joined worker. A ticket that the store has, or has already given out, changes nothing.

        RefusedError: NOT_JOINED, RESTARTED, MALFORMED, TOO_MANY.
        """

    def claim(self, claim: Claim) -> EagerFuture[list[bytes]]:
        """Returns the tickets once every rank has offered. Cancel the future to stop waiting.

        RefusedError: EXPIRED, UNKNOWN, TOO_MANY.
        """

    def release(self, claim: Claim) -> None:
        """Makes the tickets of a claim that was answered or cancelled available again if its reader did not take them.

        Never raises.
        """

    def settle(self, order: SettleOrder) -> asyncio.Future[None]:
        """Forwards an order to its worker's `orders`. RefusedError: UNKNOWN, RESTARTED, TOO_MANY."""

    async def orders(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:
        """Returns the feed of a joined worker's settle orders, with queued ones. Ends an earlier feed of the worker."""

    async def status(self) -> CoordinatorStatus:
        """Returns the counts of this store. The caller sets `uptime_s`."""

    def health(self) -> StoreHealth:
        """Returns what the store cannot do at the moment."""

    async def close(self) -> None:
        """Refuses waiting calls (NOT_READY) and ends every feed. Closing again has no effect."""
