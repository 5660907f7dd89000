# SPDX-License-Identifier: Apache-2.0
"""Adapts continuous batching: its parts by name, the generation thread, and block tables that kvlink holds.

Block tables belong to the generation thread. Code that changes them runs there, between two batches, as a job.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, TypeVar

from kvlink.errors import ConfigError, TransferError

from ..request_guard import RequestGuard
from ..request_names import printable
from .attention import Table, attention_caches, check_served
from .jobs import Jobs
from .request_ids import RequestIds
from .support import check_manager, check_processor, num_embeddings

_log = logging.getLogger("kvlink.transformers")
_UNLIMITED = 1 << 31

_T = TypeVar("_T")


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
        self.num_embeddings = num_embeddings(manager.model)
        self.request_ids = RequestIds(self.scheduler, manager.input_queue)
        self.guard = RequestGuard(_log)
        self.jobs = Jobs(self.guard, self.check_accepting, manager._wake_up_loop.set)
        self._hooked: list[tuple[Any, str]] = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses the generation thread between two batches. If its loop is about to end, waits for that instead.

        Raises ConfigError as `check_thread`.
        """
        self.check_thread()
        thread = self.manager._generation_thread
        with ExitStack() as pause:
            if self.manager.is_running():
                try:
                    pause.enter_context(self.manager.pause())
                except RuntimeError:  # the loop ended meanwhile
                    thread.join()
            yield

    def check_thread(self) -> None:
        """Raises ConfigError on the generation thread, which would wait for itself."""
        if self.manager._generation_thread is threading.current_thread():
            raise ConfigError("the generation thread cannot wait for itself; call this from another thread")

    @property
    def lives(self) -> bool:
        """Whether the generation loop will run another round."""
        status = self.manager.background_thread_status
        return bool(self.manager.is_running() and status.local_status != status.STOPPED)

    def check_accepting(self) -> None:
        """Raises ConfigError if a request that is added now would never run."""
        if self.manager.batch_processor is not self.processor:
            raise ConfigError("the manager was stopped and its cache is gone; make a new KVLinkHandoff")
        if reason := self.manager.background_thread_status.can_accept_new_requests():
            raise ConfigError(f"the manager accepts no requests: {reason}")

    def why_ended(self) -> TransferError:
        """Returns the error for work that the generation loop has left undone."""
        error = self.manager.background_thread_status.fatal_error
        if error is None:
            return TransferError("the manager was stopped; start it and ask again")
        return TransferError(
            f"the generation loop ended: {error!r}; close this KVLinkHandoff, restart the manager, and make a new one"
        )

    def check_fits(self, request_id: str | None, num_tokens: int) -> None:
        """Raises ConfigError for a request that needs more than the whole cache.

        transformers would end its loop for it, and with it every other request.
        """
        if num_tokens > self.capacity:
            raise ConfigError(
                f"request {printable(request_id)}: {num_tokens} tokens do not fit the cache of {self.capacity}; raise "
                "num_blocks, or ask for fewer"
            )

    @cached_property
    def capacity(self) -> int:
        """The number of tokens that one request may have stored."""
        return bisect(range(_UNLIMITED), self.cache.num_sectors, key=self._num_sectors) - 1

    def _num_sectors(self, num_tokens: int) -> int:
        return sum(cache.num_sectors(num_tokens) for cache in self.attention)

    def guarded(self, kind: str, request_id: object, call: Callable[[], _T]) -> _T | None:
        """Returns the result of `call`, or None if it raised. An exception would end the loop for all requests."""
        try:
            return call()
        except Exception as error:
            self.guard.caught(kind, request_id, error)
            return None

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


class TableName:
    """The name of a block table of kvlink in transformers' cache. It differs from every id that a client can choose."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __repr__(self) -> str:
        return f"<{self._what} of kvlink>"


class HeldBlocks:
    """Block tables without a request in transformers, so that nothing there writes or frees them.

    Used on the generation thread only.
    """

    def __init__(self, batching: Batching) -> None:
        self._tables: list[dict[Any, list[int]]] = [
            cache.allocator.block_table for cache in batching.attention
        ]
        self._free: Callable[[Any], None] = batching.cache.free_blocks
        self.num_tables = 0

    def has(self, name: Any) -> bool:
        """Returns whether transformers' cache has a table of a request."""
        return all(name in tables for tables in self._tables)

    def take(self, name: Any) -> Table:
        """Removes a request's table from transformers' cache and returns it."""
        table = tuple(tables[name] for tables in self._tables)
        for tables in self._tables:
            del tables[name]
        self.num_tables += 1
        return table

    def give(self, name: Any, table: Table) -> None:
        """Assigns a table to a request."""
        for tables, blocks in zip(self._tables, table, strict=True):
            tables[name] = blocks
        self.num_tables -= 1

    def free(self, table: Table) -> None:
        """Frees the blocks of a table; blocks with a known prefix stay cached."""
        name = TableName("freed blocks")
        self.give(name, table)
        self._free(name)
