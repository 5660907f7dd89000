# SPDX-License-Identifier: Apache-2.0
"""Implements the verbs of a handoff: `prefill`, `move`, `share` in one process, `submit`, `fetch` in the other."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.background import ControlThread
from kvlink.errors import ConfigError

from .attention import layouts_of
from .batching import Batching, HeldBlocks
from .fetching import Fetching
from .handoff_message import Handoff, Prefix
from .incoming import Incoming, Landed
from .memory import pool_of
from .moving import Moving
from .outgoing import Outgoing
from .support import request_types


@dataclass(frozen=True, slots=True)
class HandoffStats:
    """Counts since the start. `held_tables` is the current number of block tables that wait for a lease or bytes."""

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


class KVLinkHandoff:
    """Hands off the requests of a continuous batching manager, in both directions. Safe from any thread.

    `manager` comes from `model.init_continuous_batching`. Warm it up before, if at all; it may run or not. It may be
    restarted after `stop(keep_for_next_session=True)`; otherwise close this object first. An empty cache on a CPU moves
    into memory that peers on the host may map.

    `worker_id`, `coordinator`, `transports` and `config` are those of `kvlink.Worker`. `model` is free text that both
    ends must share, such as name and revision; if empty, it is the architecture's name.

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
        cache, config_of_model = self._batching.cache, manager.model.config.get_text_config()
        layouts = layouts_of(self._batching.attention, cache.cache_tensor, config_of_model, model)
        self._numbers = itertools.count()
        self._refusing, self._num_refused = threading.Lock(), 0
        with ExitStack() as opened:
            with self._batching.paused():
                pool = pool_of(cache, layouts)
            # One thread starts all pulls and completes them, so none of them may block it.
            config = replace(config or WorkerConfig.from_env(), inline_us=0)
            self.worker = opened.enter_context(
                Worker(pool, worker_id, coordinator=coordinator, transports=transports, config=config)
            )
            self._background = ControlThread("kvlink-handoff")
            opened.callback(self._background.close)
            self._held = HeldBlocks(self._batching)
            self._outgoing = Outgoing(self._batching, self.worker, self._held)
            self._incoming = Incoming(self._batching, self.worker, self._held, self._background)
            self._moving = Moving(self._batching, self._held, self._outgoing, self._incoming)
            self._fetching = Fetching(self._batching, self.worker, self._held, self._background)
            opened.callback(self._batching.unhook)
            with self._batching.paused():
                self._hook()
            self._background.submit(self._watch_leases())
            opened.pop_all()
        self._closed = False

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
        defaults = self._batching.manager.generation_config
        try:
            state = request_types()[0](
                request_id=f"handoff-{next(self._numbers)}" if request_id is None else request_id,
                initial_tokens=list(handoff.prompt),
                max_new_tokens=handoff.remaining(
                    defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
                ),
                eos_token_id=defaults.eos_token_id if eos_token_id is None else eos_token_id,
                streaming=streaming,
                record_timestamps=record_timestamps,
                logit_processor_kwargs=logit_processor_kwargs,
                logprobs=list(handoff.earlier_logprobs),
                _true_initial_tokens=handoff.num_prompt if handoff.num_generated else 0,
            )
            self._incoming.submit(state, handoff.open_ticket(), handoff)
        except ConfigError:
            with self._refusing:
                self._num_refused += 1
            raise
        return str(state.request_id)

    def move(self, request_id: str) -> Future[Handoff]:
        """Ends a request that generates here, and offers it to another process, which goes on by `submit`.

        The manager reports the request as failed, with the word "moved". If the future raises TransferError, the
        request was not touched: it has ended here, or has no token yet. Raises ConfigError.
        """
        return self._moving.move(request_id)

    def share(self, source: str | Sequence[int]) -> Future[Prefix]:
        """Offers the whole blocks that are cached here of a running request, by its id, or of given tokens.

        The request goes on. The future raises TransferError if nothing is cached. Raises ConfigError for a cache that
        keeps no prefixes.
        """
        return self._moving.share(source)

    def fetch(self, prefix: Prefix) -> Future[int]:
        """Pulls what is missing of a prefix into this process's cache, where requests with the same start find it.

        The future gives the number of its tokens that are cached, which may be less if there is no room, or raises a
        KVLinkError. Cached blocks may be evicted again. Raises ConfigError, and starts nothing, for a prefix that is
        malformed or does not match its ticket, and for a cache that keeps no prefixes.
        """
        return self._fetching.fetch(prefix)

    def abort(self, handoff: Handoff | Prefix) -> None:
        """Ends an offer of this process and frees its blocks. Raises UnknownRequest and ConfigError."""
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
        )

    def newest(self) -> Landed | None:
        """Returns the newest handoff that no longer waits for bytes. Its blocks may belong to others by now."""
        return self._incoming.newest

    def close(self) -> None:
        """Ends offers and pulls, and restores the manager. Requests in progress are recomputed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.worker.close()
        self._background.close()
        with self._batching.paused():
            self._batching.close()
            self._batching.unhook()
            self._outgoing.close()
            self._incoming.close()
            self._fetching.close()

    def _hook(self) -> None:
        hook, parts = self._batching.hook, self._batching
        hook(parts.processor, "prepare_next_batch", self._prepare)
        hook(parts.scheduler, "schedule_batch", self._schedule)
        hook(parts.cache, "free_blocks", self._free)
        hook(parts.outputs, "deliver", self._deliver)
        hook(parts.outputs, "deliver_batch", self._deliver_batch)

    async def _watch_leases(self) -> None:
        async for event in self.worker.watch_events():
            self._batching.post(partial(self._outgoing.ended, event))

    # The following methods replace methods of transformers, on the generation thread.

    def _prepare(self, prepare: Callable[[], bool]) -> bool:
        self._batching.run_jobs()
        self._incoming.admit()
        return prepare()

    def _free(self, free: Callable[[str, bool], None], request_id: str, no_cache: bool = False) -> None:
        if not self._outgoing.keep(request_id):
            self._incoming.forget(request_id)
            free(request_id, no_cache)

    def _deliver(self, deliver: Callable[[Any], None], output: Any) -> None:
        if not self._outgoing.deliver(output):
            deliver(output)

    def _deliver_batch(self, deliver_batch: Callable[[list[Any]], None], outputs: list[Any]) -> None:
        deliver_batch([output for output in outputs if not self._outgoing.deliver(output)])

    def _schedule(self, schedule: Callable[..., Any], *budgets: int) -> Any:
        """Schedules a batch. A cache that is full only because kvlink holds blocks is no error: they become free."""
        scheduled = schedule(*budgets)
        if scheduled[0] is None and self._waits_for_blocks():
            if self._batching.cache.evict_cached_blocks():
                scheduled = schedule(*budgets)
            if scheduled[0] is None:
                scheduled = ([], *scheduled[1:])
        return scheduled

    def _waits_for_blocks(self) -> bool:
        """Returns whether starved requests wait for blocks that kvlink holds. Of two, transformers preempts one."""
        return self._held.num_tables > 0 and len(self._batching.scheduler.starved_requests) < 2
