# SPDX-License-Identifier: Apache-2.0
"""Implements the verbs of a handoff: `prefill`, `move`, `share` in one process, `submit`, `fetch` in the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvlink import BlockPool, Ticket, Worker, WorkerConfig
from kvlink.errors import Cancelled, ConfigError
from kvlink.layout import KVLayout
from kvlink.runtime.background import ControlThread
from kvlink.runtime.supervised import keep_running

from .attention import layouts_of
from .batching import Batching, HeldBlocks
from .fetching import Fetching
from .handoff_message import Handoff, Prefix
from .hooks import Hooks
from .incoming import Incoming, Landed
from .jobs import Job
from .limits import checked_count, checked_eos
from .moving import Moving
from .outgoing import Outgoing
from .pulls import Pulls
from .support import LoadedModel, request_types


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counts since the start. `held_tables` is the current number of block tables that wait for a lease or bytes.

    `guarded` counts unexpected errors, each of which failed one request and is in the log.
    """

    offered: int
    settled: int
    expired: int
    aborted: int
    pulled: int
    pulled_bytes: int
    recomputed: int
    refused: int
    moved: int
    fetched: int
    fetched_bytes: int
    held_tables: int
    guarded: int


class KVLinkHandoff:
    """Hands off the requests of a continuous batching manager, in both directions. Safe from any thread.

    `manager` comes from `model.init_continuous_batching`. Warm it up before, if at all; it may run or not. It may be
    restarted after `stop(keep_for_next_session=True)`; otherwise close this object first. An empty cache on a CPU moves
    into memory that peers on the host may map.

    `worker_id`, `coordinator`, `transports` and `config` are those of `kvlink.Worker`. Both ends must have the same
    weights and configuration, which are read from the loaded model. `model` is free text that they must share as well.

    Raises ConfigError, naming what is missing, for versions and models that do not support handoffs.
    """

    def __init__(
        self,
        manager: Any,
        worker_id: str,
        *,
        model: str = "",
        coordinator: str | None = None,
        transports: str | None = None,
        config: WorkerConfig | None = None,
    ) -> None:
        self._batching = Batching(manager)
        config = config or WorkerConfig.from_env()
        self._model = LoadedModel(manager.model, model, config.same_model)
        cache = self._batching.cache
        layouts = layouts_of(self._batching.attention, cache.cache_tensor, self._model.text)
        self._refusing, self._num_refused = threading.Lock(), 0
        self._closing, self._closed = threading.Lock(), False
        with ExitStack() as opened:
            with self._batching.paused():
                pool = pool_of(cache, layouts)
            # One thread starts all pulls and completes them, so none of them may block it.
            config = replace(config, inline_us=0)
            self.worker = opened.enter_context(
                Worker(pool, worker_id, coordinator=coordinator, transports=transports, config=config)
            )
            self._background = ControlThread("kvlink-handoff")
            opened.callback(self._background.close)
            self._held = HeldBlocks(self._batching)
            self._outgoing = Outgoing(self._batching, self.worker, self._held)
            pulls = Pulls(self.worker, self._batching.attention, self._batching.jobs, self._background)
            self._incoming = Incoming(self._batching, self._held, pulls)
            self._moving = Moving(self._batching, self._held, self._outgoing, self._incoming)
            self._fetching = Fetching(self._batching, self.worker, self._held, pulls)
            opened.callback(self._batching.unhook)
            with self._batching.paused():
                Hooks(self._batching, self._held, self._outgoing, self._incoming, self._fetching).install()
            watch = keep_running("transformers leases", self._watch_leases)
            self._background.in_background(watch, "the leases of a handoff are not watched")
            opened.pop_all()

    def __repr__(self) -> str:
        """Returns a description of the state."""
        return f"KVLinkHandoff({'closed' if self._closed else self.worker!r}: {self.stats()})"

    def __enter__(self) -> KVLinkHandoff:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prefill(
        self, prompt: Sequence[int], request_id: str | None = None, **logit_processor_kwargs: Any
    ) -> Future[Handoff]:
        """Computes a prompt and its first token, and offers the blocks until they are settled or the lease ends.

        The future gives the Handoff, or a TransferError with the reason. The manager's own results do not include the
        request. Raises ConfigError, and starts nothing, for a prompt that does not fit the cache or an id in use.
        """
        self._follow_model()
        return self._outgoing.prefill(prompt, request_id, logit_processor_kwargs)

    def submit(
        self,
        handoff: Handoff,
        request_id: str | None = None,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: int | list[int] | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Pulls a request's blocks in the background, then generates. Returns the request's id immediately.

        Results come from the manager, as for `manager.add_request`, whose arguments these are. They start with the
        first token, which counts, and those of a moved request with all that it generated before; give it the
        arguments that it had. If the blocks cannot be pulled, the prompt is computed here instead. Raises ConfigError,
        and starts nothing, for a handoff that is malformed or does not match its ticket, for prompt and max_new_tokens
        that do not fit the cache, and for a request_id that already runs here.
        """
        self._follow_model()
        try:
            if not isinstance(handoff, Handoff):
                raise ConfigError(
                    f"submit takes a Handoff, not {type(handoff).__name__}; see Handoff.from_json"
                )
            defaults = self._batching.manager.generation_config
            limit = checked_count(defaults.max_new_tokens if max_new_tokens is None else max_new_tokens)
            if limit is None:  # it ends where the cache does; transformers would end its loop there
                limit = self._batching.capacity - handoff.num_prompt + 1
            new_state = partial(
                request_types()[0],
                initial_tokens=list(handoff.prompt),
                max_new_tokens=handoff.remaining(limit),
                eos_token_id=checked_eos(defaults.eos_token_id if eos_token_id is None else eos_token_id),
                streaming=streaming,
                record_timestamps=record_timestamps,
                logit_processor_kwargs=logit_processor_kwargs,
                logprobs=list(handoff.earlier_logprobs),
                _true_initial_tokens=handoff.num_prompt if handoff.num_generated else 0,
            )
            return self._incoming.submit(new_state, request_id, handoff)
        except ConfigError:
            with self._refusing:
                self._num_refused += 1
            raise

    def move(self, request_id: str) -> Future[Handoff]:
        """Ends a request that generates here, and offers it to another process, which goes on by `submit`.

        The manager reports the request as failed, with the word "moved". If the future raises TransferError, the
        request was not touched: it has ended here, or has no token yet. Raises ConfigError.
        """
        self._follow_model()
        return self._moving.move(request_id)

    def share(self, source: str | Sequence[int]) -> Future[Prefix]:
        """Offers the whole blocks that are cached here of a running request, by its id, or of given tokens.

        The request goes on. For a request that has no whole block yet, the future gives a Prefix without tokens, of
        which `fetch` copies nothing. It raises TransferError for a request that does not run here, and if nothing is
        cached of given tokens. Raises ConfigError for a cache that keeps no prefixes.
        """
        self._follow_model()
        return self._moving.share(source)

    def fetch(self, prefix: Prefix) -> Future[int]:
        """Pulls what is missing of a prefix into this process's cache, where requests with the same start find it.

        The future gives the number of its tokens that are cached, which may be less if there is no room, or raises a
        KVLinkError. Cached blocks may be evicted again. Raises ConfigError, and starts nothing, for a prefix that is
        malformed or does not match its ticket, and for a cache that keeps no prefixes.
        """
        self._follow_model()
        return self._fetching.fetch(prefix)

    def _follow_model(self) -> None:
        """Changes the identity of the cache if the program has loaded other weights."""
        if self._model.changed():
            self.worker.pool.model.change(self._model.text)

    def abort(self, handoff: Handoff | Prefix) -> None:
        """Ends an offer of this process and frees its blocks. Raises UnknownRequest and ConfigError."""
        if handoff.ticket:
            self.worker.abort(Ticket.from_text(handoff.ticket).request_id)

    def stats(self) -> HandoffStats:
        """Returns the counts of handoffs."""
        leases = self.worker.lease_counts()
        return HandoffStats(
            offered=leases.granted,
            settled=leases.settled,
            expired=leases.expired,
            aborted=leases.aborted,
            pulled=self._incoming.num_pulled,
            pulled_bytes=self._incoming.num_bytes,
            recomputed=self._incoming.num_recomputed,
            refused=self._num_refused + self._incoming.num_refused,
            moved=self._moving.num_moved,
            fetched=self._fetching.num_fetched,
            fetched_bytes=self._fetching.num_bytes,
            held_tables=self._held.num_tables,
            guarded=sum(self._batching.guard.counts.values()),
        )

    def newest(self) -> Landed | None:
        """Returns the newest handoff that no longer waits for bytes. Its blocks may belong to others by now."""
        return self._incoming.newest

    def close(self) -> None:
        """Ends offers and pulls, and restores the manager. Requests in progress are recomputed. Idempotent.

        Raises ConfigError on the generation thread.
        """
        self._batching.check_thread()
        with self._closing:
            if not self._closed:
                self.worker.close()
                self._background.close()
                with self._batching.paused():
                    self._batching.unhook()
                    self._batching.jobs.close(lambda: Cancelled("the handoff was closed"))
                    for part in (self._outgoing, self._incoming, self._fetching):
                        self._batching.guarded("close", None, part.close)
                self._closed = True

    async def _watch_leases(self) -> None:
        async for event in self.worker.watch_events():
            ended = partial(self._outgoing.ended, event)
            self._batching.jobs.post_event(
                Job("end of a lease", event.request_id, ended, _ignore, is_event=True)
            )


def _ignore(_: Exception) -> None:
    """Leaves an error to the log: no request is concerned."""


def pool_of(cache: Any, layouts: Sequence[KVLayout]) -> BlockPool:
    """Returns the cache as a pool. Requires that no batch runs.

    An empty cache on a CPU moves, so that peers may also read it by shm. One in use is exported where it is.
    """
    if cache.cache_tensor.device.type != "cpu" or _is_in_use(cache):
        return BlockPool.from_tensors([cache.cache_tensor], layouts)
    pool = BlockPool.allocate(layouts)
    trash_bytes = 2 * cache.bytes_per_sector
    cache.cache_tensor = pool.torch()
    for allocator in cache.cache_allocators.values():
        allocator.register_cache_tensor(
            cache.bytes_per_sector, cache.cache_tensor.numel() - trash_bytes, cache.cache_tensor, cache.pool
        )
    return pool


def _is_in_use(cache: Any) -> bool:
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    return bool(cache.pool.num_free_sectors != cache.num_sectors)
