# SPDX-License-Identifier: Apache-2.0
"""Implements the reader's side: pulls encoder outputs of other servers into the pool before a request is scheduled."""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from kvlink.errors import AccessDenied, ConfigError, KVLinkError, LayoutMismatch, StaleBlocks
from kvlink.ticket import Ticket
from kvlink.transfer.pull import Pull

from ...request_guard import RequestGuard
from ...request_names import printable
from .cache import EncoderCache, Entry
from .items import ItemFormat, offered

_log = logging.getLogger("vllm.kvlink")


class Pulls(Protocol):
    """The part of a Worker that pulls."""

    def pull(self, ticket: Ticket, into: array[int], /, *, timeout_s: float) -> Pull:
        """Starts reading a request's blocks."""
        ...


class Arrival(Enum):
    """Says whether an item that a request needs has arrived."""

    READY = "ready"
    """The pool holds it."""
    WAITING = "waiting"
    FAILED = "failed"
    """It will not come. It must be encoded here."""


class EncoderPulls:
    """Follows the items that requests wait for. A request tries each of its items once. Not thread-safe."""

    def __init__(
        self,
        cache: EncoderCache,
        worker: Pulls,
        ours: ItemFormat,
        timeout_s: float,
        counts: Counter[str],
        guard: RequestGuard,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._worker = worker
        self._ours = ours
        self._timeout_s = timeout_s
        self._counts = counts
        self._guard = guard
        self._now = now
        self._running: dict[str, Entry] = {}
        self._wanted: dict[str, list[Entry]] = {}  # by request
        self._failed: dict[str, set[str]] = {}  # items by request
        self._room_until: dict[tuple[str, str], float] = {}

    def ask(self, request_id: str, identifier: str, rows: int, params: object) -> Arrival:
        """Returns whether an item that the request needs has arrived. Starts its pull if `params` offer it."""
        if identifier in self._failed.get(request_id, ()):
            return Arrival.FAILED
        entry = self._cache.get(identifier)
        if entry is not None and entry.pull is not None:
            self._poll(entry)
            entry = self._cache.get(identifier)
        if identifier in self._failed.get(request_id, ()):
            return Arrival.FAILED
        if entry is not None and entry.item.rows != rows:
            return self._give_up(
                request_id, identifier, "mismatch", f"{entry.item.rows} embeddings have this name"
            )
        if entry is not None:
            return self._wait_for(request_id, entry)
        return self._begin(request_id, identifier, rows, params)

    def loads(self, request_id: str, entry: Entry) -> None:
        """Registers that the step that is being scheduled loads the item for this request."""
        entry.wanted.discard(request_id)
        entry.busy_until = self._cache.step + 1

    def collect(self) -> None:
        """Looks after pulls whose requests have ended."""
        for entry in list(self._running.values()):
            with self._guard.around("pull", entry.puller):
                self._poll(entry)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended, in whatever way."""
        self._failed.pop(request_id, None)
        for key in [key for key in self._room_until if key[0] == request_id]:
            del self._room_until[key]
        for entry in self._wanted.pop(request_id, ()):
            entry.wanted.discard(request_id)

    def _begin(self, request_id: str, identifier: str, rows: int, params: object) -> Arrival:
        try:
            item, ticket = offered(params, identifier, rows, self._ours)
            if not self._cache.fits(item):
                return self._give_up(request_id, identifier, "no_room", "it is larger than the pool")
            entry = self._cache.add(item)
            if entry is None:
                return self._wait_for_room(request_id, identifier)
            try:
                entry.pull = self._worker.pull(ticket, entry.blocks, timeout_s=self._timeout_s)
            except BaseException:
                self._cache.drop(entry)
                raise
        except KVLinkError as error:
            return self._give_up(request_id, identifier, _result_of(error), str(error))
        entry.puller = request_id
        self._running[identifier] = entry
        self._poll(entry)
        if identifier in self._failed.get(request_id, ()):
            return Arrival.FAILED
        return self._wait_for(request_id, entry)

    def _wait_for(self, request_id: str, entry: Entry) -> Arrival:
        if request_id not in entry.wanted:
            entry.wanted.add(request_id)
            self._wanted.setdefault(request_id, []).append(entry)
        return Arrival.READY if entry.ready else Arrival.WAITING

    def _wait_for_room(self, request_id: str, identifier: str) -> Arrival:
        """Waits for the items of other requests to be loaded, for as long as a pull may take."""
        until = self._room_until.setdefault((request_id, identifier), self._now() + self._timeout_s)
        if self._now() < until:
            return Arrival.WAITING
        return self._give_up(
            request_id, identifier, "no_room", "items of other requests fill the pool; raise pool_mib"
        )

    def _poll(self, entry: Entry) -> None:
        pull = entry.pull
        if pull is None or not pull.done():
            return
        entry.pull = None
        del self._running[entry.item.identifier]
        try:
            pull.wait(0)
        except KVLinkError as error:
            self._lost(entry, _result_of(error), str(error))
            return
        except Exception as error:
            self._guard.caught("pull", entry.puller, error)
            self._lost(entry, "unreachable", f"{error!r:.200}")
            return
        entry.ready = True
        self._counts["pulled"] += 1

    def _lost(self, entry: Entry, result: str, why: str) -> None:
        self._cache.drop(entry)
        self._give_up(entry.puller, entry.item.identifier, result, why)

    def _give_up(self, request_id: str, identifier: str, result: str, why: str) -> Arrival:
        self._counts[result] += 1
        self._failed.setdefault(request_id, set()).add(identifier)
        _log.warning(
            "encoder output not pulled request=%s item=%s: %s", printable(request_id), identifier, why
        )
        return Arrival.FAILED


def _result_of(error: KVLinkError) -> str:
    if isinstance(error, StaleBlocks):
        return "stale"
    if isinstance(error, LayoutMismatch):
        return "mismatch"
    return "malformed" if isinstance(error, (ConfigError, AccessDenied)) else "unreachable"
