# SPDX-License-Identifier: Apache-2.0
"""Queues work for the generation thread. Each job ends: it runs, or `fail` gets the reason why it cannot run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvlink.errors import ConfigError, KVLinkError

from ..request_guard import RequestGuard


@dataclass(frozen=True, slots=True)
class Job:
    """Work of one request. `fail` gets the exception of `run`, or the reason why nothing will call `run`."""

    kind: str
    request_id: object
    run: Callable[[], None]
    fail: Callable[[Exception], None]
    is_event: bool = False
    """Whether the job reports what has happened, such as the end of a lease. An event always runs."""


class Jobs:
    """The jobs of one manager. A job that raises fails its own request only."""

    def __init__(
        self, guard: RequestGuard, check_accepting: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        self._guard = guard
        self._check_accepting, self._wake = check_accepting, wake
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Returns the number of jobs that wait."""
        return len(self._queue)

    def post(self, job: Job) -> None:
        """Queues a job that runs before the next batch. Safe from any thread.

        Raises ConfigError after `close`, and if the loop has ended or is about to. Whatever is queued before is either
        run by the loop or given to `end`, because the loop ends before it calls `end`.
        """
        with self._lock:
            if self._closed:
                raise ConfigError("this KVLinkHandoff is closed; make a new one")
            self._check_accepting()
            self._queue.append(job)
        self._wake()

    def post_event(self, job: Job) -> None:
        """Queues an event. After the loop's end it waits for the next start or `close`. Safe from any thread."""
        with self._lock:
            self._queue.append(job)
        self._wake()

    def run(self) -> None:
        """Runs the jobs that are queued now, on the generation thread or while it is paused."""
        for _ in range(len(self._queue)):
            self._run(self._queue.popleft())

    def end(self, reason: Callable[[], KVLinkError]) -> None:
        """Runs the queued events, and fails all other queued jobs, each with an error of its own."""
        with self._lock:
            jobs, self._queue = self._queue, deque()
        for job in jobs:
            if job.is_event:
                self._run(job)
            else:
                self._fail(job, reason())

    def close(self, reason: Callable[[], KVLinkError]) -> None:
        """Does what `end` does, and takes no more jobs. Idempotent."""
        with self._lock:
            self._closed = True
        self.end(reason)

    def _run(self, job: Job) -> None:
        try:
            job.run()
        except KVLinkError as error:
            self._fail(job, error)
        except Exception as error:
            self._guard.caught(job.kind, job.request_id, error)
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        try:
            job.fail(error)
        except Exception as another:
            self._guard.caught(f"failed {job.kind}", job.request_id, another)
