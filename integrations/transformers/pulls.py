# SPDX-License-Identifier: Apache-2.0
"""Runs the pulls of a handoff on its background thread, and reports each to the generation thread when it has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvlink import Pull, Ticket, Worker
from kvlink.errors import Cancelled, ConfigError
from kvlink.runtime.background import ControlThread

from ..request_names import printable
from .attention import AttentionCache, Table, blocks_of, by_group
from .jobs import Job, Jobs

_log = logging.getLogger("kvlink.transformers")


@dataclass(slots=True, eq=False)
class RunningPull:
    """One pull. `pull` is None until it has begun."""

    request_id: object
    landed: Callable[[Exception | None], None]
    failed: Callable[[Exception], None]
    pull: Pull | None = None
    num_bytes: int = 0
    cancelled: bool = False
    task: asyncio.Task[None] | None = None


class Pulls:
    """The pulls of one handoff. No pull stops or delays another."""

    def __init__(
        self, worker: Worker, caches: Sequence[AttentionCache], jobs: Jobs, background: ControlThread
    ) -> None:
        self._worker, self._caches = worker, caches
        self._jobs, self._background = jobs, background

    def start(
        self, running: RunningPull, ticket: Ticket, table: Table, num_matched: int, num_tokens: int
    ) -> None:
        """Pulls the tokens from `num_matched` to `num_tokens` into a table.

        When nothing writes there any more, the generation thread calls `landed` with the error or None, and `failed`
        if that raises. Raises ConfigError if the handoff is closed.
        """
        blocks = blocks_of(self._caches, table, num_tokens)
        ranges = [(num_matched, cache.num_slots(num_tokens)) for cache in self._caches]
        begin = partial(self._worker.pull, ticket, by_group(blocks), tokens=by_group(ranges))
        self._background.in_background(self._run(running, begin), "a pull did not end")

    def cancel(self, running: RunningPull) -> None:
        """Ends a pull soon. Does not wait."""
        running.cancelled = True
        with suppress(ConfigError):  # the thread has ended, and with it the pull
            self._background.in_background(_cancel(running), "a pull was not cancelled")

    async def _run(self, running: RunningPull, begin: Callable[[], Pull]) -> None:
        error: Exception | None = None
        running.task = asyncio.current_task()
        try:
            if not running.cancelled:
                running.pull = begin()
                running.num_bytes = (await running.pull).num_bytes
                _log_path(running.request_id, running.pull)
        except Exception as failed:
            error = failed
        except asyncio.CancelledError:
            error = Cancelled("the pull was cancelled")
            raise
        finally:
            job = partial(running.landed, error)
            self._jobs.post_event(Job("landing", running.request_id, job, running.failed, is_event=True))


async def _cancel(running: RunningPull) -> None:
    if running.task is not None:
        running.task.cancel()


def _log_path(request_id: object, pull: Pull) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("pulled request=%s %s", printable(request_id), "; ".join(map(str, pull.explain())))
