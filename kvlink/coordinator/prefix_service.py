# SPDX-License-Identifier: Apache-2.0
"""Serves the directory of prefixes: one for each tenant, within the bounds of the coordinator. Belongs to one loop.

It is soft state in this process's memory, whatever the store: a coordinator that restarts begins with an empty one,
and workers publish again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from functools import partial

from kvlink.control.codec import CoordinatorCalls as Calls
from kvlink.control.limits import MAX_FOUND, Limits
from kvlink.control.now import now
from kvlink.control.refusal import RefusedError
from kvlink.control.rpc.server import GrpcServer
from kvlink.control.security import caller
from kvlink.control.values import CoordinatorStatus, FoundPrefix, PrefixChanges, PrefixQuery
from kvlink.coordinator.prefix_directory import PrefixDirectory
from kvlink.coordinator.store import Store
from kvlink.runtime.supervised import start_loop
from kvlink.types import Joined

_WATCH_AGAIN_S = 1.0
_MOST_STEPS = 500
"""So many steps of directories take about a millisecond."""


class PrefixService:
    """Keeps a directory for each tenant that publishes, and drops what workers published once they are gone."""

    def __init__(self, store: Store, limits: Limits | None = None, clock: Callable[[], float] = now) -> None:
        self._store = store
        self._limits = limits or Limits()
        self._clock = clock
        self._directories: dict[str, PrefixDirectory] = {}
        self._following: dict[str, asyncio.Task[None]] = {}
        self._id = secrets.randbits(63) | 1

    def add_calls(self, server: GrpcServer) -> None:
        """Adds the calls of the directory to a server."""
        server.unary(Calls.PUBLISH_PREFIXES, self.publish)
        server.unary(Calls.FIND_PREFIX, self.find)

    async def publish(self, changes: PrefixChanges) -> int:
        """Makes the changes of a joined worker, and returns the directory's id. RefusedError: as Store.check_own."""
        await self._store.check_own(changes.worker_id, changes.epoch)
        directory = self._followed(caller().tenant)
        await self._expire(directory)
        for request_id in changes.withdrawn:
            directory.withdraw(changes.worker_id, request_id)
            await self._pause(directory)
        for prefix in changes.prefixes:
            directory.publish(changes.worker_id, changes.epoch, prefix, self._clock())
            await self._make_room()
            if await self._pause(directory):
                await self._store.check_own(changes.worker_id, changes.epoch)
        return self._id

    async def find(self, query: PrefixQuery) -> list[FoundPrefix]:
        """Returns servers of the caller's tenant that have the longest prefix, those on the reader's host first."""
        directory = self._directories.setdefault(caller().tenant, PrefixDirectory())
        await self._expire(directory)
        found = directory.find(query, MAX_FOUND if query.worker_id else query.most)
        if len(found) > 1 and query.worker_id:
            here = await self._host(query.worker_id)
            near = [bool(here) and await self._host(worker_id) == here for worker_id, _ in found]
            found = [each for _, each in sorted(zip(near, found, strict=True), key=lambda pair: not pair[0])]
        return [each for _, each in found[: query.most]]

    async def counted(self, status: CoordinatorStatus) -> CoordinatorStatus:
        """Returns the status with the counts of the directories that the caller may see."""
        who = caller()
        seen = [each for name, each in self._directories.items() if who.sees_all or name == who.tenant]
        for directory in seen:
            await self._expire(directory)
        return status._replace(
            prefixes=sum(map(len, seen)),
            prefix_bytes=sum(each.num_bytes for each in seen),
            published_prefixes=sum(each.num_published for each in seen),
            evicted_prefixes=sum(each.num_evicted for each in seen),
            expired_prefixes=sum(each.num_expired for each in seen),
            prefix_lookups=sum(each.num_lookups for each in seen),
            prefix_hits=sum(each.num_hits for each in seen),
        )

    async def close(self) -> None:
        """Stops following the members. Closing again has no effect."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _followed(self, tenant: str) -> PrefixDirectory:
        directory = self._directories.setdefault(tenant, PrefixDirectory())
        if tenant not in self._following:
            # The task has the caller's context, and therefore watches the caller's tenant.
            self._following[tenant] = start_loop("prefix watch", partial(self._follow, directory))
        return directory

    async def _make_room(self) -> None:
        """Evicts from the tenant that takes the most, so that none loses its prefixes to one that takes more."""
        while True:
            sizes = {each: each.num_bytes for each in self._directories.values()}
            if (
                sum(sizes.values()) <= self._limits.prefix_bytes
                and sum(map(len, sizes)) <= self._limits.prefixes
            ):
                return
            directory = max(sizes, key=lambda each: sizes[each])
            directory.evict_oldest()
            directory.num_steps += len(sizes)
            await self._pause(directory)

    async def _expire(self, directory: PrefixDirectory) -> None:
        while directory.expire(self._clock(), most=1):
            await self._pause(directory)

    async def _pause(self, directory: PrefixDirectory) -> bool:
        """Lets other calls run after a number of steps, and returns whether it did."""
        if directory.num_steps < _MOST_STEPS:
            return False
        directory.num_steps = 0
        await asyncio.sleep(0)
        return True

    async def _host(self, worker_id: str) -> str:
        try:
            return (await self._store.worker(worker_id, 0)).host.boot_id
        except RefusedError:
            return ""

    async def _follow(self, directory: PrefixDirectory) -> None:
        """Drops the prefixes of workers that leave, are replaced, or stop beating."""
        while True:
            with contextlib.suppress(RefusedError, StopAsyncIteration):
                await self._follow_one_watch(directory)
            await asyncio.sleep(_WATCH_AGAIN_S)

    async def _follow_one_watch(self, directory: PrefixDirectory) -> None:
        """Returns or raises RefusedError when the watch ends, because it fell behind or the store does not answer."""
        with contextlib.closing(await self._store.watch()) as feed:
            joined = {(each.card.worker_id, each.card.epoch) for each in await anext(feed)}
            for publisher in directory.publishers():
                if publisher not in joined:
                    await self._drop_worker(directory, *publisher)
            async for changes in feed:
                for change in changes:
                    if change.what is Joined.DOWN:
                        await self._drop_worker(directory, change.card.worker_id, change.card.epoch)

    async def _drop_worker(self, directory: PrefixDirectory, worker_id: str, epoch: int) -> None:
        while directory.drop_worker(worker_id, epoch, most=1):
            await self._pause(directory)
