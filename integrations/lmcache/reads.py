# SPDX-License-Identifier: Apache-2.0
"""Implements the reader's side: it asks one owner for leases on objects, and pulls their pages.

A read ends when its bytes have arrived, when its time is over, or when LMCache frees the memory that it writes to,
whichever is first. After that no byte of it arrives, whether LMCache asks for its result or not.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from kvlink import Pull, Worker
from kvlink.errors import Cancelled, ConfigError, KVLinkError, TransferError, TransferTimeout
from kvlink.runtime.supervised import start_thread
from kvlink.ticket import Ticket

from ..request_guard import RequestGuard
from .messages import Answer, Ask
from .pages import Batch, Object, PageIds, Pages, Wanted, batches, mismatch
from .places import Hold, Places

T = TypeVar("T")

_log = logging.getLogger("kvlink.lmcache")

_FORGOTTEN_S = 60.0
"""LMCache does not ask for the result of a read that has been over for so long."""

Exchange = Callable[[bytes, float], bytes]
"""Sends an ask to the owner, and returns its answer within so many seconds. Raises KVLinkError. One thread calls it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The two ends of a client's reads. `reader` and `owner` are the addresses that they advertise."""

    reader: str
    owner: str
    exchange: Exchange


@dataclass(slots=True)
class _Part:
    """One batch of a read. `granted` are the indices of its objects that the owner has leased."""

    batch: Batch
    hold: Hold
    granted: list[int] = field(default_factory=list)
    started: Future[Pull] = field(default_factory=Future)

    def has_ended(self) -> bool:
        return self.started.done() and (self.started.exception() is not None or self.started.result().done())


@dataclass(slots=True)
class _Task:
    num_objects: int
    deadline: float
    parts: list[_Part]


class Reads:
    """The reads of one client. Thread-safe. No call but `greet` waits for the owner."""

    def __init__(
        self,
        worker: Worker,
        pages: Pages,
        places: Places,
        peer: Peer,
        timeout_s: float,
    ) -> None:
        self._worker = worker
        self._pages = pages
        self._places = places
        self._peer = peer
        self.timeout_s = timeout_s
        """The time of a read from `begin` on, in seconds."""
        self._numbers = itertools.count(1)
        self._tasks: dict[int, _Task] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.guard = RequestGuard(_log)
        """Counts unexpected exceptions."""
        self._thread = start_thread("lmcache-ask", self._work, self._closed)

    @property
    def num_tasks(self) -> int:
        """The number of reads whose result was not asked for yet."""
        return len(self._tasks)

    def greet(self, timeout_s: float) -> None:
        """Waits until the owner has answered that the two servers fit together. Raises KVLinkError."""
        answered: Future[Answer] = Future()
        self._put(lambda: _resolve(answered, lambda: self._ask([], timeout_s)))
        answered.result()

    def begin(self, theirs: Sequence[Wanted], ours: Sequence[Object]) -> int:
        """Starts to read the owner's objects into ours. Returns the task for `query`.

        An object that cannot be read at all is reported by `query`, too.
        """
        found = list(batches(self._pages, theirs, ours, self._fitting(theirs, ours)))
        parts = [_Part(batch, self._places.hold(self._pages.ids(batch.ours))) for batch in found]
        task = _Task(len(ours), time.monotonic() + self.timeout_s, parts)
        self._forget_old()
        with self._lock:
            number = next(self._numbers)
            self._tasks[number] = task
        for part in task.parts:
            if self._closed.is_set():
                part.hold.finish()
            self._put(partial(_resolve, part.started, partial(self._pull, part, task.deadline)))
        return number

    def query(self, number: int) -> list[bool] | None:
        """Returns which objects have arrived, or None while any is on its way. Then the task has ended.

        An unknown task has no objects.
        """
        with self._lock:
            task = self._tasks.get(number)
            if task is None:
                return []
            is_over = time.monotonic() >= task.deadline
            if not is_over and not all(map(self._has_ended, task.parts)):
                return None
            del self._tasks[number]
        arrived = [False] * task.num_objects
        for part in task.parts:
            if self._has_arrived(part):
                for index in part.granted:
                    arrived[part.batch.places[index]] = True
        self._end(task)
        return arrived

    def close(self) -> None:
        """Ends all reads. On return no more bytes arrive. The exchange must return soon. Idempotent."""
        self._closed.set()
        self._jobs.put(None)
        with self._lock:
            tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            self._end(task)
        self._thread.join()
        self._run_left()

    def _put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._closed.is_set():
            self._run_left()

    def _work(self) -> None:
        """Runs the asks one after the other, because a socket belongs to one thread."""
        while (job := self._jobs.get()) is not None:
            job()

    def _run_left(self) -> None:
        """Lets jobs that were too late find that out."""
        with suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job()

    def _fitting(self, theirs: Sequence[Wanted], ours: Sequence[Object]) -> list[int]:
        """Returns the places of the objects that can be read. The first problem is logged."""
        if len(theirs) != len(ours):
            self._warn(f"{len(theirs)} objects were to be read into {len(ours)}", len(ours))
            return []
        problems = {
            place: problem
            for place, pair in enumerate(zip(theirs, ours, strict=True))
            if (problem := mismatch(self._pages, *pair))
        }
        if problems:
            self._warn(next(iter(problems.values())), len(problems))
        return [place for place in range(len(ours)) if place not in problems]

    def _has_ended(self, part: _Part) -> bool:
        try:
            return part.has_ended()
        except Exception as error:
            self.guard.caught("state of a read", self._peer.owner, error)
            return True

    def _has_arrived(self, part: _Part) -> bool:
        if not part.started.done():
            self._warn("the time of the read is over", len(part.batch.places))
            return False
        try:
            arrived = part.started.result().wait(0)
        except KVLinkError as error:
            self._warn(str(error), len(part.batch.places))
            return False
        except Exception as error:
            self.guard.caught("read", self._peer.owner, error)
            return False
        if len(part.granted) < len(part.batch.places):
            self._warn(
                "the owner does not hold them any more, or not under a read lock",
                len(part.batch.places) - len(part.granted),
            )
        return arrived and not part.hold.ended

    def _warn(self, why: str, num_objects: int) -> None:
        _log.warning("%d objects of %s were not read: %s", num_objects, self._peer.owner, why)

    def _end(self, task: _Task) -> None:
        """Ends what still runs of a task. On return no more bytes of it arrive."""
        for part in task.parts:
            self._end_part(part)

    def _end_part(self, part: _Part) -> None:
        """If ending fails, the hold stays, so that LMCache cannot give the memory to another object."""
        try:
            part.hold.finish()
        except Exception as error:
            self.guard.caught("end of a read", self._peer.owner, error)
        else:
            self._places.release(part.hold)

    def _forget_old(self) -> None:
        too_old = time.monotonic() - _FORGOTTEN_S
        with self._lock:
            old = [number for number, task in self._tasks.items() if task.deadline < too_old]
            forgotten = [self._tasks.pop(number) for number in old]
        for task in forgotten:
            self._end(task)

    def _pull(self, part: _Part, deadline: float) -> Pull:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TransferTimeout(f"{self._peer.owner} was not asked in time, other asks took too long")
        if part.hold.ended:
            raise Cancelled("LMCache has freed the memory that the objects were to be read into")
        batch = part.batch
        answer = self._ask(batch.theirs, left_s)
        part.granted = [index for index in range(len(batch.places)) if index not in answer.refused]
        if answer.ticket is None:
            raise TransferError(f"{self._peer.owner} does not hold them any more, or not under a read lock")
        into = self._pages.ids(batch.ours[index] for index in part.granted)
        ticket = _checked(answer.ticket, into, self._peer.owner)
        left_s = max(deadline - time.monotonic(), 0)
        return part.hold.begin(lambda: self._worker.pull(ticket, into, timeout_s=left_s), Pull.cancel)

    def _ask(self, objects: Sequence[Wanted], timeout_s: float) -> Answer:
        ask = Ask(self._peer.reader, self._pages.page_bytes, objects).to_bytes()
        blob = self._peer.exchange(ask, timeout_s)
        return Answer.from_bytes(blob, self._peer.owner, len(objects))


def _checked(ticket: Ticket, into: PageIds, owner: str) -> Ticket:
    """Returns a ticket for as many pages as are read. Raises TransferError."""
    if not len(ticket.block_ids) == ticket.num_tokens == len(into) <= ticket.ready or ticket.group_sizes:
        raise TransferError(f"{owner} leased {len(ticket.block_ids)} pages instead of {len(into)}")
    return ticket


def _resolve(future: Future[T], job: Callable[[], T]) -> None:
    """Gives a future the result or the exception of a job, which some caller asks for."""
    try:
        future.set_result(job())
    except Exception as error:
        future.set_exception(error)


DEFAULT_S = 20.0
MARGIN_S = 1.0
"""A read ends so long before LMCache gives up on it."""
_LEAST_S = 1.0


def longest_read_s(load_timeout_s: float) -> float:
    """Returns the most seconds that a read may take. Raises ConfigError if LMCache gives up too early."""
    if not load_timeout_s >= _LEAST_S + MARGIN_S:
        raise ConfigError(
            f"--p2p-load-timeout {load_timeout_s:g}: a read must end {MARGIN_S:g} s before LMCache gives up on it; set "
            f"it to {_LEAST_S + MARGIN_S:g} or more"
        )
    return load_timeout_s - MARGIN_S


def read_timeout_s(load_timeout_s: float, configured_s: float | None) -> float:
    """Returns the time of a read. `configured_s` is KVLINK_TIMEOUT_S if it is set. Raises ConfigError."""
    longest_s = longest_read_s(load_timeout_s)
    if configured_s is None:
        return min(DEFAULT_S, longest_s)
    if not configured_s <= longest_s:
        raise ConfigError(
            f"KVLINK_TIMEOUT_S is {configured_s:g} and --p2p-load-timeout {load_timeout_s:g}: reads would go on after "
            f"LMCache has given up on them; set KVLINK_TIMEOUT_S to at most {longest_s:g}, or unset it"
        )
    return configured_s
