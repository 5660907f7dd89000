# SPDX-License-Identifier: Apache-2.0
"""Keeps a Mirror up to date with one listing and then one watch, and fails over between members of etcd."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable

from kvlink.control.denials import LogQuota
from kvlink.control.now import now
from kvlink.coordinator.store.etcd.api import Etcd, StoreFull, put
from kvlink.coordinator.store.etcd.history import same
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.mirror import Mirror, News
from kvlink.errors import KVLinkError
from kvlink.runtime.backoff import Backoff
from kvlink.runtime.supervised import start_awaited, start_loop, survived
from kvlink.v1 import etcd_pb2 as pb

_log = logging.getLogger("kvlink.control")

_PULSE_S = 1.0
_IDLE_PULSE_S = 30.0
"""Pulse interval while no call waits for changes here."""
_STALE_S = 1.5
"""A watch that has not delivered a write after this long is moved to another member."""
_LOGGED_EVERY_S = 30.0
_KEPT_S = 120.0
"""Older history of etcd is compacted. A coordinator that loses its members for less than this can catch up."""


class Sync:
    """Follows etcd from `start` to `close`, and calls `on_news` for every revision in order.

    `is_awaited` says whether any call depends on the watch, so that a silent watch must be noticed soon. If etcd was
    emptied or restored, it is listed again.
    """

    def __init__(
        self,
        etcd: Etcd,
        layout: Keys,
        mirror: Mirror,
        on_news: Callable[[News], None],
        is_awaited: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._etcd = etcd
        self._layout = layout
        self._mirror = mirror
        self._on_news = on_news
        self._is_awaited = is_awaited
        self._clock = clock
        self._revision = 0
        self._last: list[pb.Event] = []
        """The events of `_revision`. It is empty after a listing."""
        self._awaited: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._history: deque[tuple[float, int]] = deque()
        self._compacted_at = -math.inf
        self._avoid_member: Callable[[], None] = lambda: None
        self._following: asyncio.Task[None] | None = None
        self._following_since = -math.inf
        self._tasks: list[asyncio.Task[None]] = []
        self._losses = LogQuota(2, _LOGGED_EVERY_S, clock)
        self.loaded = asyncio.Event()
        etcd.history.on_break = self._start_over

    def start(self) -> None:
        """Starts following. Call it once."""
        self._etcd.health.doubt()
        self._tasks = [start_loop("etcd watch", self._run), start_loop("etcd pulse", self._beat)]

    async def close(self) -> None:
        """Stops following. Closing again has no effect."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _, _, done in self._awaited:
            done.cancel()

    async def reached(self, revision: int) -> bool:
        """Waits until the mirror has what was written at `revision`.

        Returns False if it does not arrive in time. Then the watch moves to another member.
        """
        if self._revision >= revision:
            return True
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._awaited, (revision, next(self._numbers), done))
        await asyncio.wait([done], timeout=_STALE_S)
        if not done.done():
            done.cancel()
            _log.warning(
                "the watch of etcd lags behind, moving it to another member revision=%d seen=%d",
                revision,
                self._revision,
            )
            self._restart()
        return self._revision >= revision

    async def written(self, revision: int) -> None:
        """Waits like `reached` for a write of this moment. Its arrival proves that the mirror is up to date."""
        if await self.reached(revision) and self.loaded.is_set():
            self._etcd.health.proved()

    async def pulse(self) -> None:
        """Returns when all earlier writes have reached the mirror. Raises CoordinatorUnavailable."""
        self._etcd.health.doubt()
        done = await self._etcd.commit(pb.TxnRequest(success=[put(self._layout.pulse, b"")]))
        await self.written(done.header.revision)
        self._history.append((self._clock(), done.header.revision))

    def _restart(self) -> None:
        """Moves the watch to another member, unless another waiter has just done that."""
        if self._following is not None and now() - self._following_since > _STALE_S:
            self._avoid_member()
            self._following.cancel()

    def _start_over(self, why: str) -> None:
        """Drops what the mirror can no longer know, and lists everything again."""
        _log.warning("etcd was emptied or restored, reading it again seen=%d why=%s", self._revision, why)
        self.loaded.clear()
        self._mirror.forget_requests()
        self._history.clear()
        self._revision, self._last = 0, []
        self._release(math.inf)
        if self._following is not None:
            self._following.cancel()

    async def _run(self) -> None:
        backoff = Backoff()
        while True:
            self._following_since = now()
            self._following = start_awaited(self._follow(backoff))
            try:
                await asyncio.wait([self._following])
                if not self._following.cancelled() and (error := self._following.exception()) is not None:
                    if isinstance(error, KVLinkError):
                        self._log_loss(error)
                    else:
                        survived("etcd watch", error)
            finally:
                self._following.cancel()
            await asyncio.sleep(backoff.delay_s())

    def _log_loss(self, error: KVLinkError) -> None:
        if (suppressed := self._losses.take()) is not None:
            _log.warning("lost etcd suppressed=%d error=%s", suppressed, error)

    async def _follow(self, backoff: Backoff) -> None:
        if self.loaded.is_set() and self._last:
            # A watch from a revision that etcd has not reached is silent. This read detects that case.
            await self._etcd.read(self._layout.pulse)
            if not self.loaded.is_set():
                return
            overlap, start = self._last, self._revision
        else:
            revision, kvs = await self._etcd.load(self._layout.prefix)
            await self._apply(self._mirror.changes_to(kvs))
            self._advance(revision, [])
            self.loaded.set()
            self._etcd.health.proved()
            overlap, start = [], revision + 1
        stream = await self._etcd.watch(self._layout.prefix, start)
        self._avoid_member = stream.avoid_server
        try:
            while (reply := await stream.receive()) is not None:
                self._etcd.history.note_watch(reply.header)
                if reply.compact_revision:
                    _log.warning(
                        "etcd has compacted changes that this coordinator lacks, reading it again revision=%d",
                        self._revision,
                    )
                    self.loaded.clear()
                    return
                if reply.canceled:
                    stream.avoid_server()
                    return
                backoff.reset()
                revisions = _by_revision(reply)
                if overlap and revisions:
                    if not same(revisions.pop(0), overlap):
                        self._etcd.history.note_break(f"revision {start} has other contents")
                        return
                    overlap = []
                await self._take(revisions)
        finally:
            stream.cancel()
            self._etcd.health.doubt()

    async def _take(self, revisions: list[list[pb.Event]]) -> None:
        for events in revisions:
            revision = events[0].kv.mod_revision
            if revision > self._revision:
                await self._apply(events)
                self._advance(revision, events)

    async def _apply(self, events: list[pb.Event]) -> None:
        """Applies a revision. If this is cancelled, the whole of it is applied again."""
        for number, part in enumerate(self._mirror.parts(events)):
            if number:
                await asyncio.sleep(0)
            self._on_news(self._mirror.apply(part, self._clock()))

    def _advance(self, revision: int, events: list[pb.Event]) -> None:
        if revision >= self._revision:
            self._revision, self._last = revision, events
        self._etcd.history.reached(revision)
        self._release(self._revision)

    def _release(self, revision: float) -> None:
        while self._awaited and self._awaited[0][0] <= revision:
            _, _, done = heapq.heappop(self._awaited)
            if not done.done():
                done.set_result(None)

    async def _beat(self) -> None:
        pulsed = now()
        while True:
            await asyncio.sleep(_PULSE_S)
            is_needed = self._is_awaited() or self._etcd.health.is_doubted
            if not is_needed and now() - pulsed < _IDLE_PULSE_S:
                continue
            pulsed = now()
            await self.tend()

    async def tend(self) -> None:
        """Pulses, and compacts old history, which an etcd that is full needs most."""
        await self._attempt(self._pulse_or_read())
        await self._attempt(self._compact())

    async def _attempt(self, work: Awaitable[None]) -> None:
        try:
            await work
        except KVLinkError as error:
            self._log_loss(error)
        except Exception as error:
            survived("etcd pulse", error)

    async def _pulse_or_read(self) -> None:
        try:
            await self.pulse()
        except StoreFull:
            reply = await self._etcd.read(self._layout.pulse)
            self._history.append((self._clock(), reply.header.revision))
            self._etcd.health.proved()  # a watch only shows writes, so a full etcd allows no better proof

    async def _compact(self) -> None:
        oldest, now = 0, self._clock()
        while self._history and self._history[0][0] < now - _KEPT_S:
            oldest = self._history.popleft()[1]
        if oldest and now - self._compacted_at > _KEPT_S / 2:
            self._compacted_at = now
            await self._etcd.compact(oldest)


def _by_revision(reply: pb.WatchResponse) -> list[list[pb.Event]]:
    groups = itertools.groupby(reply.events, lambda event: event.kv.mod_revision)
    return [list(events) for _, events in groups]
