# SPDX-License-Identifier: Apache-2.0
"""Copies prefixes of another process into this cache, where requests with the same start find them."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvlink import Ticket, Worker
from kvlink.background import ControlThread
from kvlink.errors import Cancelled, ConfigError

from .attention import Table, blocks_of, by_group, completed
from .batching import Batching, HeldBlocks
from .handoff_message import Prefix
from .moving import check_shares, resolve
from .support import request_types


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prefix whose blocks are being pulled. The first `num_matched` tokens were cached here before."""

    state: Any
    ticket: Ticket
    future: Future[int] = field(default_factory=Future)
    table: Table = ()
    num_matched: int = 0


class Fetching:
    """The prefixes that arrive."""

    def __init__(
        self, batching: Batching, worker: Worker, held: HeldBlocks, background: ControlThread
    ) -> None:
        self._batching = batching
        self._cache = batching.cache
        self._worker = worker
        self._held = held
        self._background = background
        self._names = (f"kvlink-fetch-{number}" for number in itertools.count())
        self._running: set[_Fetch] = set()
        self.num_fetched = self.num_bytes = 0

    def fetch(self, prefix: Prefix) -> Future[int]:
        """Implements `KVLinkHandoff.fetch`."""
        check_shares(self._batching)
        self._batching.check_accepting()
        ticket = prefix.open_ticket()
        if ticket.num_tokens != len(prefix.tokens) or not prefix.tokens:
            raise ConfigError(
                f"the ticket of {ticket.request_id} has {ticket.num_tokens} tokens, and {len(prefix.tokens)} are given"
            )
        fetch = _Fetch(request_types()[0](next(self._names), list(prefix.tokens)), ticket)
        fetch.future.set_running_or_notify_cancel()
        self._batching.post(partial(self._begin, fetch))
        return fetch.future

    # The following methods run on the generation thread.

    def close(self) -> None:
        """Fails what has not arrived. The worker is closed, so nothing writes."""
        for fetch in list(self._running):
            self._land(fetch, Cancelled("the handoff was closed"))

    def _begin(self, fetch: _Fetch) -> None:
        name, tokens = fetch.state.request_id, fetch.state.initial_tokens
        # transformers matches all but the last token.
        fetch.num_matched = fetch.state.position_offset = self._cache.search_prefix_match(name, [*tokens, 0])
        missing = len(tokens) - fetch.num_matched
        has_room = missing > 0 and self._batching.scheduler._try_to_meet_safety_margin()
        if has_room and self._cache.can_store_request_tokens(fetch.state, missing):
            fetch.table = self._held.take(name)
            self._running.add(fetch)
            self._background.submit(self._pull(fetch))
            return
        if fetch.num_matched:
            self._held.free(self._held.take(name))
        resolve(fetch.future, partial(self._released, fetch))

    def _released(self, fetch: _Fetch) -> int:
        self._worker.release(fetch.ticket)
        return fetch.num_matched

    def _land(self, fetch: _Fetch, error: Exception | None) -> None:
        if fetch not in self._running:
            return
        self._running.remove(fetch)
        if error is not None:
            self._held.free(fetch.table)
            fetch.future.set_exception(error)
            return
        num_tokens, name = len(fetch.state.initial_tokens), fetch.state.request_id
        self._held.give(name, fetch.table)
        self._cache.mark_complete_blocks(
            fetch.state, completed(self._batching.attention, fetch.num_matched, num_tokens)
        )
        self._held.free(self._held.take(name))  # blocks of a known prefix stay cached
        self.num_fetched += 1
        fetch.future.set_result(num_tokens)

    # The following method runs on the background thread.

    async def _pull(self, fetch: _Fetch) -> None:
        error: Exception | None = None
        num_tokens, caches = len(fetch.state.initial_tokens), self._batching.attention
        blocks = blocks_of(caches, fetch.table, num_tokens)
        ranges = [(fetch.num_matched, num_tokens) for _ in caches]
        try:
            pull = self._worker.pull(fetch.ticket, by_group(blocks), tokens=by_group(ranges))
            self.num_bytes += (await pull).num_bytes
        except Exception as failed:
            error = failed
        self._batching.post(partial(self._land, fetch, error))
