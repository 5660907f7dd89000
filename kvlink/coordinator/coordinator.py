# SPDX-License-Identifier: Apache-2.0
"""Implements the Coordinator service on top of a Store, and starts and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple, TypeVar

from kvlink.control.codec import CARD, write_view
from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.limits import Limits
from kvlink.control.now import now
from kvlink.control.overview import (
    Beat,
    Overview,
)
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.rpc.feed import Feed, merged
from kvlink.control.rpc.server import GrpcServer, Send
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
from kvlink.coordinator.prefix_service import PrefixService
from kvlink.coordinator.readiness import Readiness
from kvlink.coordinator.reports import Reports
from kvlink.coordinator.store import Store
from kvlink.coordinator.store.etcd import EtcdStore
from kvlink.coordinator.store.etcd.api import split_url
from kvlink.coordinator.store.members import BEATS_PER_LEASE
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import TenantStores, by_tenant, stores
from kvlink.errors import ConfigError
from kvlink.runtime.supervised import start_loop
from kvlink.types import WorkerCard

MEMORY = "memory"
_VERSION = version("kvlink")
_log = logging.getLogger("kvlink.control")
T = TypeVar("T")
S = TypeVar("S", bound=Sequence[Any])

DEFAULT_PORT = 7400
_AT_ONCE = 64
_CLOSE_GRACE_S = 0.5
"""A closing coordinator waits this long for replies that are being sent."""


class About(NamedTuple):
    """Tells operators where and how a coordinator serves. `problem` is "" if it is ready."""

    address: str
    version: str
    store: str
    tls: bool
    problem: str


class Coordinator:
    """Serves one Store. Belongs to the event loop that starts it."""

    def __init__(
        self,
        store: Store | None = None,
        lease_s: float = 10.0,
        reflect: bool = False,
        security: Security | None = None,
        gate: Gate = coordinator_gate,
        store_name: str = MEMORY,
        limits: Limits | None = None,
    ) -> None:
        """Under TLS, `gate` identifies callers, and `tenant_stores.stores` must make `store`. `store_name` is what
        `about` tells, and `limits` are those of the directory of prefixes. Raises ConfigError.
        """
        security = Security.from_env() if security is None else security
        security.check_coordinator()
        self._store = store or stores(lambda tenant: MemoryStore(lease_s), security)
        if security.keyring and not isinstance(self._store, TenantStores):
            raise ConfigError(
                "under TLS a coordinator's store must be made by kvlink.coordinator.tenant_stores.stores"
            )
        self._lease_s = lease_s
        self._started = now()
        self._draining = False
        self._claims: dict[asyncio.Future[list[bytes]], None] = {}
        self._server = GrpcServer("coordinator", reflect, security, gate)
        self._reports = Reports()
        self._incumbents = Incumbents(self._store, security)
        self._prefixes = PrefixService(self._store, limits)
        self.counts = self._server.counts
        """Counts of calls and their refusals."""
        self.readiness = Readiness(self._server.set_ready, self._store.health, lambda: self._draining)
        self._add_calls(self._server)
        self._about = About(
            "", version("kvlink"), _without_passwords(store_name), security.keyring is not None, ""
        )
        self.address = ""

    def __repr__(self) -> str:
        state = "draining" if self._draining else "serving" if self.address else "not started"
        return f"Coordinator({self.address or 'no address'}, {state})"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts the store, listens and returns "host:port". Port 0 picks a free port.

        Raises ConfigError if it cannot listen on the port.
        """
        await self._store.start()
        self.address = await self._server.start(host, port)
        self.readiness.start()
        if self.waits_for_store:
            _log.warning("coordinator refuses calls until its store answers address=%s", self.address)
        else:
            _log.info("coordinator serving address=%s lease_s=%g", self.address, self._lease_s)
        return self.address

    @property
    def waits_for_store(self) -> bool:
        """Whether the store has not answered since the start, or not for a while."""
        return self._store.health().stale_s > 0

    async def drain(self) -> None:
        """Sends every caller to other coordinators of the same store, or to the next process at this address.

        Waiting claims are refused as retryable, and clients repeat them under their claim ids. Returns when the running
        calls are answered. gRPC may leave a call that arrives while the port closes unanswered until then, so no call
        is kept waiting here.
        """
        self._draining = True
        await self.readiness.poll()
        for answer in self._claims:
            answer.cancel()
        await self._server.stop(_CLOSE_GRACE_S)

    async def close(self) -> None:
        """Ends every stream and call. Workers and readers retry until a coordinator listens. May be called again."""
        self._draining = True
        await self.readiness.close()
        await self._prefixes.close()
        await self._store.close()
        await self._server.stop(_CLOSE_GRACE_S)

    def _add_calls(self, server: GrpcServer) -> None:
        server.unary(Calls.JOIN, self._join)
        server.bidirectional(Calls.KEEP_ALIVE, self._keep_alive)
        server.unary(Calls.LEAVE, self._leave)
        server.unary(Calls.GET_WORKER, lambda worker: self._store.worker(*worker))
        server.unary(Calls.LIST_WORKERS, self._list_workers)
        server.streaming(Calls.WATCH_WORKERS, self._watch_workers)
        server.unary(Calls.OFFER, self._offer)
        server.unary(Calls.CLAIM, self._claim)
        server.unary(Calls.SETTLE, self._settle)
        server.bidirectional(Calls.HANDOFFS, self._handoffs)
        self._prefixes.add_calls(server)
        server.unary(Calls.STATUS, lambda _: self.status())
        server.unary(Calls.OVERVIEW, lambda _: self.overview())

    async def _join(self, request: JoinRequest) -> Membership:
        await self._incumbents.check_ended(request.card, request.rejoin)
        epoch = await self._store.join(request.card, request.rejoin)
        _log.info("joined worker=%s epoch=%d agent=%s", request.card.worker_id, epoch, request.card.agent)
        return Membership(epoch, self._lease_s, self._lease_s / BEATS_PER_LEASE)

    async def _keep_alive(self, beats: AsyncIterator[Beat], send: Send[Push]) -> None:
        forwarding: asyncio.Task[None] | None = None
        orders: Feed[SettleOrder] | None = None
        reported: Beat | None = None
        try:
            async for worker in beats:
                if not await self._store.beat(worker.worker_id, worker.epoch):
                    await send(Push(PushKind.REJOIN))
                    return
                if orders is None:
                    orders = await self._store.orders(worker.worker_id, worker.epoch)
                    forwarding = start_loop("settle orders", partial(_forward, orders, send))
                reported = worker
                self._reports.note(caller().tenant, worker)
                await send(Push(PushKind.ACK))
        finally:
            if reported is not None:
                self._reports.forget(caller().tenant, reported.worker_id, reported.epoch)
            if orders is not None and forwarding is not None:
                orders.close()
                forwarding.cancel()
                await asyncio.gather(forwarding, return_exceptions=True)

    async def _leave(self, worker: WorkerEpoch) -> Nothing:
        await self._store.leave(worker.worker_id, worker.epoch)
        _log.info("left worker=%s epoch=%d", worker.worker_id, worker.epoch)
        return Nothing()

    async def _list_workers(self, _: Nothing) -> list[WorkerCard]:
        return await _prepared(CARD.encode, await self._store.workers())

    async def _watch_workers(self, watch: Watch, send: Send[WorkerChanges]) -> None:
        with contextlib.closing(await self._store.watch()) as feed:
            self.counts.feeds.add(feed)
            try:
                first = watch.sees(await anext(feed))
                await _prepared(CARD.encode, [change.card for change in first])
                await send(first)
                async for changes in merged(feed):
                    if seen := watch.sees(changes):
                        await send(seen)
            finally:
                self.counts.feeds.discard(feed)

    async def _offer(self, offer: Offer) -> Nothing:
        await self._store.offer(offer)
        return Nothing()

    async def _claim(self, claim: Claim) -> list[bytes]:
        self._check_not_draining()
        answer = self._store.claim(claim)
        self._claims[answer] = None
        try:
            return await answer
        except asyncio.CancelledError:
            self._check_not_draining()
            raise
        finally:
            del self._claims[answer]

    def _check_not_draining(self) -> None:
        if self._draining:
            raise RefusedError(Reason.NOT_READY, f"the coordinator at {self.address} is shutting down; retry")

    async def _settle(self, order: SettleOrder) -> Nothing:
        await self._store.settle(order)
        return Nothing()

    async def _handoffs(self, batches: AsyncIterator[HandoffBatch], send: Send[HandoffResults]) -> None:
        async def counted(results: HandoffResults) -> None:
            for refused in results.refused:
                self.counts.refused(Calls.HANDOFFS.name, refused.reason)
            await send(results)

        await HandoffServer(self._store, counted, self._server.failures).serve(batches)

    def about(self) -> About:
        """Returns where and how this coordinator serves."""
        return self._about._replace(address=self.address, problem=self.readiness.why_not())

    async def status(self) -> CoordinatorStatus:
        """Returns the counts of the caller's tenant, or of all tenants when this process calls."""
        status = await self._prefixes.counted(await self._store.status())
        return status._replace(uptime_s=now() - self._started)

    async def overview(self) -> Overview:
        """Returns the overview of the workers that `status` counts, and the calls if the caller sees all tenants."""
        views = self._reports.views(await by_tenant(self._store))
        await _prepared(write_view, views)
        return self.counts.overview(views) if caller().sees_all else Overview(views)


async def _prepared(write: Callable[[T], object], values: S) -> S:
    """Encodes values, some at a time, so that a reply with all of them is made of what the codec remembers."""
    for number, value in enumerate(values):
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)
        write(value)
    return values


def _without_passwords(store: str) -> str:
    return re.sub(r"[^/,@]*@", "", store)


BackgroundService = Callable[[Coordinator], contextlib.AbstractAsyncContextManager[object]]
"""Makes a context that is entered on the coordinator's event loop and left when the coordinator ends."""


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
    on_ready: Callable[[str, bool], None] = lambda address, waits_for_store: None,
    background_service: BackgroundService = lambda coordinator: contextlib.nullcontext(),
) -> None:
    """Runs a coordinator until SIGTERM or SIGINT, then drains it and returns.

    `store` is "memory", or "etcd://host:2379,host2:2379/fleet" for any number of equal coordinators. `on_ready` gets
    "host:port" as bound, and whether calls are refused until the store answers. `background_service` is entered before
    that and left last. Raises ConfigError if it cannot listen on the port.
    """
    security = security or Security.from_env()
    tenants = stores(store_maker(store, lease_s, limits), security)
    coordinator = Coordinator(tenants, lease_s, reflect, security, gate, store, limits)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        address = await coordinator.start(host, port)
        async with background_service(coordinator):
            on_ready(address, coordinator.waits_for_store)
            await stop.wait()
            await coordinator.drain()
    finally:
        await coordinator.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def store_maker(name: str, lease_s: float = 10.0, limits: Limits | None = None) -> Callable[[str], Store]:
    """Returns a function that makes the store of a tenant. Raises ConfigError for an unknown name.

    `name` is "memory" or "etcd://host:2379,host2:2379/fleet".
    """
    if name == MEMORY:
        return lambda tenant: MemoryStore(lease_s, limits)
    split_url(name)
    return lambda tenant: EtcdStore(name, lease_s, limits, tenant=tenant)


_NEW_OBJECTS = 50_000
"""Python's default of 700 costs a quarter of a coordinator's time (`kvlink bench control`)."""


def tune_gc() -> None:
    """Makes garbage collection rare. Call it after the process has imported everything, and before it serves.

    Nothing that a call leaves is part of a reference cycle, so collecting it frees nothing.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, 20, 20)
