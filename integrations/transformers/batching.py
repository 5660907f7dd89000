# SPDX-License-Identifier: Apache-2.0
"""Adapts continuous batching: its parts by name, the generation thread, and block tables that kvlink holds.

Block tables belong to the generation thread. Code that changes them runs there, between two batches, as a job.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from bisect import bisect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from kvlink.errors import ConfigError

from .attention import Table, attention_caches, check_served
from .support import check_manager, check_processor

_log = logging.getLogger("kvlink.transformers")


class Batching:
    """The parts of one manager.

    `hook` replaces methods until `unhook`. A job posted meanwhile runs before the next batch.
    """

    def __init__(self, manager: Any) -> None:
        check_manager(manager)
        check_served(getattr(manager.model.config.get_text_config(), "layer_types", None) or ())
        self.manager = manager
        with self.paused():
            if manager.batch_processor is None:
                manager.batch_processor = manager._create_batch_processor()
            self.processor = manager.batch_processor
            check_processor(self.processor)
            self.attention = attention_caches(self.processor.cache.cache_allocators)
        self.scheduler = self.processor.scheduler
        self.cache = self.processor.cache
        self.outputs = manager.output_router
        self.request_ids = RequestIds()
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._posting, self._closed = threading.Lock(), False
        self._hooked: list[tuple[Any, str]] = []

    def paused(self) -> AbstractContextManager[Any]:
        """Pauses the generation thread between two batches."""
        pause: AbstractContextManager[Any] = (
            self.manager.pause() if self.manager.is_running() else nullcontext()
        )
        return pause

    def check_accepting(self) -> None:
        """Raises ConfigError if a request that is added now would never run."""
        if self.manager.batch_processor is not self.processor:
            raise ConfigError("the manager was stopped and its cache is gone; make a new KVLinkHandoff")
        if reason := self.manager.background_thread_status.can_accept_new_requests():
            raise ConfigError(f"the manager accepts no requests: {reason}")

    def check_fits(self, request_id: str, num_tokens: int) -> None:
        """Raises ConfigError for a request that needs more than the whole cache.

        transformers would end its loop for it, and with it every other request.
        """
        if self._num_sectors(num_tokens) > self.cache.num_sectors:
            capacity = bisect(range(num_tokens), self.cache.num_sectors, key=self._num_sectors) - 1
            raise ConfigError(
                f"request {request_id}: {num_tokens} tokens do not fit the cache of {capacity}; raise num_blocks, or "
                "ask for fewer"
            )

    def _num_sectors(self, num_tokens: int) -> int:
        return sum(cache.num_sectors(num_tokens) for cache in self.attention)

    def post(self, job: Callable[[], None]) -> None:
        """Queues `job` for the generation thread. Safe from any thread. Raises ConfigError after `close`."""
        with self._posting:
            if self._closed:
                raise ConfigError("this KVLinkHandoff is closed; make a new one")
            self._jobs.put(job)
        self.manager._wake_up_loop.set()

    def run_jobs(self) -> None:
        """Runs the queued jobs, on the generation thread or while it is paused."""
        while not self._jobs.empty():
            _run(self._jobs.get_nowait())

    def close(self) -> None:
        """Runs the jobs that were posted before, and takes no more. The generation thread is paused or ended."""
        with self._posting:
            self._closed = True
        self.run_jobs()

    def hook(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replaces a method of one object by `replacement(original, …)`. Raises ConfigError if it is replaced."""
        if name in vars(owner):
            raise ConfigError(
                f"{type(owner).__name__}.{name} is replaced already; use one KVLinkHandoff per manager"
            )
        setattr(owner, name, partial(replacement, getattr(owner, name)))
        self._hooked.append((owner, name))

    def unhook(self) -> None:
        """Restores the original methods. Idempotent."""
        while self._hooked:
            delattr(*self._hooked.pop())


class RequestIds:
    """The ids of requests that were given to a handoff and have not ended.

    Callers choose the ids, so two requests may have the same one; the second is refused. Safe from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[str] = set()

    def reserve(self, request_id: str) -> None:
        """Adds an id. Raises ConfigError if it is present."""
        with self._lock:
            if request_id in self._taken:
                raise ConfigError(
                    f"request {request_id} already runs here; give each request its own request_id"
                )
            self._taken.add(request_id)

    def release(self, request_id: str) -> None:
        """Removes the id of a request that has ended. Idempotent."""
        with self._lock:
            self._taken.discard(request_id)


def _run(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # transformers would end all requests on an exception
        _log.exception("a job of a handoff failed")


class HeldBlocks:
    """Block tables without a request in transformers, so that nothing there writes or frees them.

    Used on the generation thread only.
    """

    def __init__(self, batching: Batching) -> None:
        self._tables: list[dict[str, list[int]]] = [
            cache.allocator.block_table for cache in batching.attention
        ]
        self._free: Callable[[str], None] = batching.cache.free_blocks
        self._names = (f"kvlink-{number}" for number in itertools.count())
        self.num_tables = 0

    def has(self, request_id: str) -> bool:
        """Returns whether transformers' cache has a table of a request."""
        return all(request_id in tables for tables in self._tables)

    def take(self, request_id: str) -> Table:
        """Removes a request's table from transformers' cache and returns it."""
        self.num_tables += 1
        return tuple(tables.pop(request_id) for tables in self._tables)

    def give(self, request_id: str, table: Table) -> None:
        """Assigns a table to a request."""
        self.num_tables -= 1
        for tables, blocks in zip(self._tables, table, strict=True):
            tables[request_id] = blocks

    def free(self, table: Table) -> None:
        """Frees the blocks of a table; blocks with a known prefix stay cached."""
        name = next(self._names)
        self.give(name, table)
        self._free(name)
