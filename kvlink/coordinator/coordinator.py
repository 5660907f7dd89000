# SPDX-License-Identifier: Apache-2.0
"""The coordinator: a Store behind the Coordinator service, and how it starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.limits import Limits
from kvlink.control.now import now
from kvlink.control.overview import Beat, Overview
from kvlink.control.refusal import Reason, Refused
from kvlink.control.rpc.feed import Feed, merged
from kvlink.control.rpc.server import Host, Send
from kvlink.control.security import Gate, Security, caller, coordinator_gate
from kvlink.control.values import (
    Claim,
    CoordinatorStatus,
    HandoffBatch,
    HandoffResults,
    JoinRequest,
    Membership,
    Nothing,
    Offer,
    Push,
    PushKind,
    SettleOrder,
    Watch,
    WorkerChanges,
    WorkerEpoch,
)
from kvlink.coordinator.handoff_service import HandoffServer
from kvlink.coordinator.incumbents import Incumbents
from kvlink.coordinator.readiness import Readiness
from kvlink.coordinator.reports import Reports
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.factory import MEMORY, store_maker
from kvlink.coordinator.store.members import BEATS_PER_LEASE
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import TenantStores, by_tenant, stores
from kvlink.errors import ConfigError
from kvlink.types import WorkerCard

_log = logging.getLogger("kvlink.control")
T = TypeVar("T")

DEFAULT_PORT = 7400
_CLOSE_GRACE_S = 0.5
"""For replies that are on their way when a coordinator closes."""


class Coordinator:
    """Serves one Store. Belongs to the event loop that starts it."""

    def __init__(
        self,
        store: Store | None = None,
        lease_s: float = 10.0,
        reflect: bool = False,
        security: Security | None = None,
        gate: Gate = coordinator_gate,
    ) -> None:
        """`gate` says whose a call is, under TLS; `store` must be of `tenancy.stores` then. Raises ConfigError."""
        security = Security.from_env() if security is None else security
        security.check_coordinator()
        self._store = store or stores(lambda tenant: MemoryStore(lease_s), security)
        if security.keyring and not isinstance(self._store, TenantStores):
            raise ConfigError(
                "under TLS a coordinator's store is made by kvlink.coordinator.tenant_stores.stores"
            )
        self._lease_s = lease_s
        self._started = now()
        self._leaving = False
        self._claims: dict[asyncio.Future[list[bytes]], None] = {}
        self._host = Host("coordinator", reflect, security, gate)
        self._reports = Reports()
        self._incumbents = Incumbents(self._store, security)
        self.counts = self._host.counts
        """Of calls and their refusals."""
        self.readiness = Readiness(self._host.say_ready, self._store.health, lambda: self._leaving)
        self._add_calls(self._host)
        self.address = ""

    def __repr__(self) -> str:
        state = "ending" if self._leaving else "serving" if self.address else "not started"
        return f"Coordinator({self.address or 'nowhere'}, {state})"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listens (port 0: any) and returns "host:port". Raises ConfigError when the port cannot be had."""
        await self._store.start()
        self.address = await self._host.start(host, port)
        self.readiness.start()
        _log.info("coordinator serving address=%s lease_s=%g", self.address, self._lease_s)
        return self.address

    async def hand_over(self) -> None:
        """Sends every caller away: to the others that serve the same store, or to the next process at this address.

        Claims that wait are refused as retryable, and come back under their claim ids. Returns when the calls under way
        are answered. One that comes in as the port closes gRPC may leave without an answer until then, which is why
        nobody is left waiting here.
        """
        self._leaving = True
        await self.readiness.look()
        for answer in self._claims:
            answer.cancel()
        await self._host.stop(_CLOSE_GRACE_S)

    async def close(self) -> None:
        """Ends every stream and call; workers and readers come back when somebody listens. Idempotent."""
        self._leaving = True
        await self.readiness.close()
        await self._store.close()
        await self._host.stop(_CLOSE_GRACE_S)

    def _add_calls(self, host: Host) -> None:
        host.unary(Calls.JOIN, self._join)
        host.bidirectional(Calls.KEEP_ALIVE, self._keep_alive)
        host.unary(Calls.LEAVE, self._leave)
        host.unary(Calls.GET_WORKER, self._get_worker)
        host.unary(Calls.LIST_WORKERS, self._list_workers)
        host.streaming(Calls.WATCH_WORKERS, self._watch_workers)
        host.unary(Calls.OFFER, self._offer)
        host.unary(Calls.CLAIM, self._claim)
        host.unary(Calls.SETTLE, self._settle)
        host.bidirectional(Calls.HANDOFFS, self._handoffs)
        host.unary(Calls.STATUS, lambda _: self.status())
        host.unary(Calls.OVERVIEW, lambda _: self.overview())

    async def _join(self, request: JoinRequest) -> Membership:
        if not request.rejoin:
            await self._incumbents.check_gone(request.card)
        epoch = await self._store.join(request.card, request.rejoin)
        _log.info("joined worker=%s epoch=%d agent=%s", request.card.worker_id, epoch, request.card.agent)
        return Membership(epoch, self._lease_s, self._lease_s / BEATS_PER_LEASE)

    async def _keep_alive(self, beats: AsyncIterator[Beat], send: Send[Push]) -> None:
        forwarding: asyncio.Task[None] | None = None
        orders: Feed[SettleOrder] | None = None
        worker: Beat | None = None
        try:
            async for worker in beats:
                if not await self._store.beat(worker.worker_id, worker.epoch):
                    await send(Push(PushKind.REJOIN))
                    return
                if orders is None:
                    orders = await self._store.orders(worker.worker_id, worker.epoch)
                    forwarding = asyncio.create_task(_forward(orders, send))
                self._reports.note(caller().tenant, worker)
                await send(Push(PushKind.ACK))
        finally:
            if worker is not None:
                self._reports.forget(caller().tenant, worker.worker_id, worker.epoch)
            if orders is not None and forwarding is not None:
                orders.close()
                forwarding.cancel()
                await asyncio.gather(forwarding, return_exceptions=True)

    async def _leave(self, worker: WorkerEpoch) -> Nothing:
        await self._store.leave(worker.worker_id, worker.epoch)
        _log.info("left worker=%s epoch=%d", worker.worker_id, worker.epoch)
        return Nothing()

    async def _get_worker(self, worker: WorkerEpoch) -> WorkerCard:
        return await self._store.worker(worker.worker_id, worker.epoch)

    async def _list_workers(self, _: Nothing) -> list[WorkerCard]:
        return await self._store.workers()

    async def _watch_workers(self, watch: Watch, send: Send[WorkerChanges]) -> None:
        with contextlib.closing(await self._store.watch()) as feed:
            self.counts.feeds.add(feed)
            try:
                await send(watch.sees(await anext(feed)))
                async for changes in merged(feed):
                    if seen := watch.sees(changes):
                        await send(seen)
            finally:
                self.counts.feeds.discard(feed)

    async def _offer(self, offer: Offer) -> Nothing:
        await self._store.offer(offer)
        return Nothing()

    async def _claim(self, claim: Claim) -> list[bytes]:
        self._check_not_leaving()
        answer = self._store.claim(claim)
        self._claims[answer] = None
        try:
            return await answer
        except asyncio.CancelledError:
            self._check_not_leaving()
            raise
        finally:
            del self._claims[answer]

    def _check_not_leaving(self) -> None:
        if self._leaving:
            raise Refused(Reason.NOT_READY, f"the coordinator at {self.address} is ending; ask again")

    async def _settle(self, order: SettleOrder) -> Nothing:
        await self._store.settle(order)
        return Nothing()

    async def _handoffs(self, batches: AsyncIterator[HandoffBatch], send: Send[HandoffResults]) -> None:
        async def counted(results: HandoffResults) -> None:
            for refused in results.refused:
                self.counts.refused(Calls.HANDOFFS.name, refused.reason)
            await send(results)

        await HandoffServer(self._store, counted, self._host.failures).serve(batches)

    async def status(self) -> CoordinatorStatus:
        """Counts of the caller's tenant; of all, when this process asks."""
        return (await self._store.status())._replace(uptime_s=now() - self._started)

    async def overview(self) -> Overview:
        """Of the caller's workers, as `status`. Calls are those of all tenants, for who sees all."""
        views = self._reports.views(await by_tenant(self._store))
        return self.counts.overview(views) if caller().sees_all else Overview(views)


BackgroundService = Callable[[Coordinator], contextlib.AbstractAsyncContextManager[object]]
"""What runs as long as a coordinator does, on its event loop."""


async def _forward(orders: Feed[SettleOrder], send: Send[Push]) -> None:
    async for order in orders:
        await send(Push(PushKind.SETTLE, order.slot, order.settle_nonce))


async def serve(
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    store: str = MEMORY,
    lease_s: float = 10.0,
    limits: Limits | None = None,
    reflect: bool = False,
    security: Security | None = None,
    gate: Gate = coordinator_gate,
    on_ready: Callable[[str], None] = lambda address: None,
    beside: BackgroundService = lambda coordinator: contextlib.nullcontext(),
) -> None:
    """Runs a coordinator until SIGTERM or SIGINT, then hands over and returns.

    `store` is "memory", or "etcd://host:2379,host2:2379/fleet": then any number of coordinators serve alike.
    `on_ready` gets "host:port" as bound; what is `beside` is entered before, and left last. Raises ConfigError when
    the port cannot be had.
    """
    security = security or Security.from_env()
    tenants = stores(store_maker(store, lease_s, limits), security)
    coordinator = Coordinator(tenants, lease_s, reflect, security, gate)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        address = await coordinator.start(host, port)
        async with beside(coordinator):
            on_ready(address)
            await stop.wait()
            await coordinator.hand_over()
    finally:
        await coordinator.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
