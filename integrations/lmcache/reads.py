# SPDX-License-Identifier: Apache-2.0
"""Implements the reader's side: it asks one owner for leases on objects, and pulls their pages."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvlink import Pull, Worker
from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import Cancelled, KVLinkError, TransferError
from kvlink.ticket import Ticket

from .messages import Ask, ticket_in
from .pages import Batch, Object, Pages, batches

_log = logging.getLogger("kvlink.lmcache")

Exchange = Callable[[bytes, float], bytes]
"""Sends an ask to the owner, and returns its answer within so many seconds. Raises KVLinkError. One thread calls it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The two ends of a client's reads. `reader` and `owner` are the addresses that they advertise."""

    reader: str
    owner: str
    exchange: Exchange


Part = tuple[Batch, "Future[Pull]"]


class Reads:
    """The reads of one client. Thread-safe. No call but `close` waits for the owner."""

    def __init__(
        self, worker: Worker, pages: Pages, peer: Peer, keys: TicketKeys | None, timeout_s: float
    ) -> None:
        self._worker = worker
        self._pages = pages
        self._peer = peer
        self._keys = keys
        self._timeout_s = timeout_s
        self._numbers = itertools.count(1)
        self._running: dict[int, list[Part]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._asking = ThreadPoolExecutor(1, "kvlink-lmcache-ask")

    def greet(self, timeout_s: float) -> None:
        """Waits until the owner has answered that the two servers fit together. Raises KVLinkError."""
        self._asking.submit(self._ask, [], timeout_s).result()

    def submit(self, theirs: Sequence[Object], ours: Sequence[Object]) -> int:
        """Starts to read the owner's objects into ours. Returns the task for `query`. Raises ConfigError."""
        deadline = time.monotonic() + self._timeout_s
        parts = list(batches(self._pages, theirs, ours))
        with self._lock:
            if self._closed:
                raise Cancelled(f"the client of {self._peer.owner} is closed")
            task = next(self._numbers)
            self._running[task] = [(part, self._asking.submit(self._pull, part, deadline)) for part in parts]
        return task

    def query(self, task: int) -> list[bool] | None:
        """Returns which objects have arrived, or None while any is on its way. Then the task has ended.

        Raises KeyError for a task that has ended.
        """
        with self._lock:
            parts = self._running[task]
            if not all(started.done() and _has_ended(started) for _, started in parts):
                return None
            del self._running[task]
        arrived = [False] * sum(len(batch.places) for batch, _ in parts)
        for batch, started in parts:
            has_arrived = self._has_arrived(batch, started)
            for place in batch.places:
                arrived[place] = has_arrived
        return arrived

    def _has_arrived(self, batch: Batch, started: Future[Pull]) -> bool:
        try:
            return started.result().wait()
        except KVLinkError as error:
            _log.warning("%d objects of %s were not read: %s", len(batch.places), self._peer.owner, error)
            return False

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Ends all reads. On return no more bytes arrive. `last` runs on the thread that asks. Idempotent."""
        with self._lock:
            running, self._running = self._running, {}
            was_closed, self._closed = self._closed, True
        if was_closed:
            return
        for parts in running.values():
            for _, started in parts:
                started.cancel()
        self._asking.submit(last)
        self._asking.shutdown()
        for parts in running.values():
            for _, started in parts:
                if not started.cancelled() and started.exception() is None:
                    started.result().cancel()

    def _pull(self, batch: Batch, deadline: float) -> Pull:
        ticket = self._ask(batch.theirs, deadline - time.monotonic())
        if ticket is None:
            raise TransferError(f"{self._peer.owner} answered without a ticket")
        left_s = deadline - time.monotonic()
        return self._worker.pull(ticket, self._pages.ids(batch.ours), timeout_s=max(left_s, 0))

    def _ask(self, objects: Sequence[Object], timeout_s: float) -> Ticket | None:
        ask = Ask(self._peer.reader, self._pages.page_bytes, objects).to_bytes(self._keys)
        return ticket_in(self._peer.exchange(ask, max(timeout_s, 0)), self._peer.owner)


def _has_ended(started: Future[Pull]) -> bool:
    return started.cancelled() or started.exception() is not None or started.result().done()
