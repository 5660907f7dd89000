# SPDX-License-Identifier: Apache-2.0
"""Keeps one store per tenant, so that no tenant can reach the data of another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.rpc.eager_future import EagerFuture, eagerly
from kvlink.control.rpc.feed import Feed
from kvlink.control.security import Role, Security, caller
from kvlink.control.values import Claim, CoordinatorStatus, Offer, SettleOrder, StoreHealth, WorkerChanges
from kvlink.coordinator.store import Store
from kvlink.runtime.supervised import start_awaited
from kvlink.types import WorkerCard

F = TypeVar("F", bound=asyncio.Future[Any])

_MAX_TENANTS = 1_024


def stores(make: Callable[[str], Store], security: Security) -> Store:
    """Returns a store per tenant under TLS. Without TLS callers are not identified, and all share one store."""
    return TenantStores(make) if security.keyring else make("")


async def by_tenant(store: Store) -> dict[str, list[WorkerCard]]:
    """Returns the joined workers that the caller may see, by tenant. Without TLS, all belong to tenant ""."""
    return await store.by_tenant() if isinstance(store, TenantStores) else {"": await store.workers()}


class TenantStores:
    """Implements `Store` on the store of the calling tenant.

    Observers of all tenants, and this process, see the stores of all tenants as one. `make(tenant)` makes a tenant's
    store at its first call.
    """

    def __init__(self, make: Callable[[str], Store]) -> None:
        self._make = make
        self._stores: dict[str, asyncio.Task[Store]] = {}

    async def start(self) -> None:  # noqa: D102
        pass

    async def join(self, card: WorkerCard, rejoin: bool) -> int:  # noqa: D102
        return await (await self._here()).join(card, rejoin)

    async def beat(self, worker_id: str, epoch: int) -> bool:  # noqa: D102
        return await (await self._here()).beat(worker_id, epoch)

    async def leave(self, worker_id: str, epoch: int) -> None:  # noqa: D102
        await (await self._here()).leave(worker_id, epoch)

    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:  # noqa: D102
        return _shown(await (await self._here()).worker(worker_id, epoch))

    async def check_own(self, worker_id: str, epoch: int) -> None:  # noqa: D102
        await (await self._here()).check_own(worker_id, epoch)

    async def workers(self) -> list[WorkerCard]:  # noqa: D102
        return [card for cards in (await self.by_tenant()).values() for card in cards]

    async def by_tenant(self) -> dict[str, list[WorkerCard]]:
        """Returns the cards of `workers` by tenant."""
        return {
            tenant: [_shown(card) for card in await store.workers()]
            for tenant, store in (await self._in_sight()).items()
        }

    async def watch(self) -> Feed[WorkerChanges]:  # noqa: D102
        return await (await self._here()).watch()

    def offer(self, offer: Offer) -> asyncio.Future[None]:  # noqa: D102
        return self._try_begin(lambda store: store.offer(offer), start_awaited)

    def claim(self, claim: Claim) -> EagerFuture[list[bytes]]:  # noqa: D102
        return self._try_begin(lambda store: store.claim(claim), eagerly)

    def release(self, claim: Claim) -> None:  # noqa: D102
        self._opened()[caller().tenant].release(claim)

    def settle(self, order: SettleOrder) -> asyncio.Future[None]:  # noqa: D102
        return self._try_begin(lambda store: store.settle(order), start_awaited)

    async def orders(self, worker_id: str, epoch: int) -> Feed[SettleOrder]:  # noqa: D102
        return await (await self._here()).orders(worker_id, epoch)

    async def status(self) -> CoordinatorStatus:  # noqa: D102
        rows = [await store.status() for store in (await self._in_sight()).values()]
        return CoordinatorStatus._make(map(sum, zip(CoordinatorStatus(), *rows, strict=True)))

    def health(self) -> StoreHealth:  # noqa: D102
        return StoreHealth.worst(store.health() for store in self._opened().values())

    async def close(self) -> None:  # noqa: D102
        for opening in self._stores.values():
            opening.cancel()
        for store in await asyncio.gather(*self._stores.values(), return_exceptions=True):
            if not isinstance(store, BaseException):
                await store.close()

    async def _here(self) -> Store:
        return await asyncio.shield(self._opening())

    def _try_begin(self, call: Callable[[Store], F], later: Callable[[Coroutine[Any, Any, Any]], F]) -> F:
        """Calls the calling tenant's store now, or as soon as it has started: then `later` makes the future."""
        here = self._opening()

        async def begin() -> Any:
            return await call(await asyncio.shield(here))

        return call(here.result()) if here.done() else later(begin())

    def _opening(self) -> asyncio.Task[Store]:
        """Returns the task that starts the calling tenant's store. If the start failed, it is tried again."""
        tenant = caller().tenant
        if caller().sees_all:
            raise RefusedError(Reason.DENIED, "this call needs a tenant, and the caller belongs to none")
        opening = self._stores.get(tenant)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            if opening is None and len(self._stores) >= _MAX_TENANTS:
                raise RefusedError(
                    Reason.TOO_MANY, f"this coordinator already serves {_MAX_TENANTS} tenants, its limit"
                )
            opening = self._stores[tenant] = start_awaited(_started(self._make(tenant)))
        return opening

    async def _in_sight(self) -> dict[str, Store]:
        if not caller().sees_all:
            return {caller().tenant: await self._here()}
        return self._opened()

    def _opened(self) -> dict[str, Store]:
        opened = [(name, each) for name, each in self._stores.items() if each.done() and not each.cancelled()]
        return {name: each.result() for name, each in opened if not each.exception()}


async def _started(store: Store) -> Store:
    await store.start()
    return store


def _shown(card: WorkerCard) -> WorkerCard:
    """Returns the card without addresses and keys if the caller is an observer."""
    if caller().role is Role.WORKER:
        return card
    bare = [replace(each, address=b"", pool_keys=(), lease_keys=()) for each in card.transports]
    return replace(card, transports=tuple(bare), channel=None)
