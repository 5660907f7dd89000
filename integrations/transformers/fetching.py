# SPDX-License-Identifier: Apache-2.0
"""Copies prefixes of another process into this cache, where requests with the same start find them."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvlink import Ticket, Worker
from kvlink.errors import Cancelled, ConfigError

from ..request_names import printable
from .attention import Table, completed
from .batching import Batching, HeldBlocks, TableName
from .handoff_message import Prefix
from .jobs import Job
from .limits import check_readable
from .moving import check_shares, resolve
from .pulls import Pulls, RunningPull
from .support import request_types


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prefix whose blocks are being pulled. The first `num_matched` tokens were cached here before.

    `table` is empty unless kvlink holds blocks for it.
    """

    state: Any
    ticket: Ticket
    future: Future[int] = field(default_factory=Future)
    table: Table = ()
    num_matched: int = 0
    running: RunningPull | None = None


class Fetching:
    """The prefixes that arrive."""

    def __init__(self, batching: Batching, worker: Worker, held: HeldBlocks, pulls: Pulls) -> None:
        self._batching, self._cache = batching, batching.cache
        self._worker = worker
        self._held, self._pulls = held, pulls
        self._running: set[_Fetch] = set()
        self.num_fetched = self.num_bytes = 0

    @property
    def num_running(self) -> int:
        """The number of prefixes that are being pulled."""
        return len(self._running)

    def fetch(self, prefix: Prefix) -> Future[int]:
        """Implements `KVLinkHandoff.fetch`."""
        check_shares(self._batching)
        self._batching.check_accepting()
        future: Future[int] = Future()
        future.set_running_or_notify_cancel()
        if not prefix.tokens and not prefix.ticket:
            future.set_result(0)
            return future
        ticket = self._checked(prefix)
        state = request_types()[0](TableName("a prefix"), list(prefix.tokens))
        fetch = _Fetch(state, ticket, future)
        name = printable(ticket.request_id)
        self._batching.jobs.post(
            Job("fetch", name, partial(self._begin, fetch), partial(self._abandon, fetch))
        )
        return future

    def _checked(self, prefix: Prefix) -> Ticket:
        """Compares a prefix with its ticket and with this process's cache. Afterwards nothing in it can raise."""
        ticket = prefix.open_ticket()
        if ticket.num_tokens != len(prefix.tokens) or not prefix.tokens:
            raise ConfigError(
                f"the ticket of {printable(ticket.request_id)} has {ticket.num_tokens} tokens, and "
                f"{len(prefix.tokens)} are given"
            )
        if len(ticket.groups()) != len(self._batching.attention):
            raise ConfigError(
                f"the ticket of {printable(ticket.request_id)} is of another model; run the same model at both ends"
            )
        check_readable(self._batching, prefix.tokens)
        return ticket

    # The following methods run on the generation thread.

    def end(self, error: Exception) -> None:
        """Fails what has not arrived when the generation loop has ended. Blocks are freed when their pulls end."""
        for fetch in self._running:
            _fail(fetch, error)
            if fetch.running is not None:
                self._pulls.cancel(fetch.running)

    def close(self) -> None:
        """Fails what has not arrived. The worker is closed, so nothing writes."""
        for fetch in list(self._running):
            self._abandon(fetch, Cancelled("the handoff was closed"))

    def _begin(self, fetch: _Fetch) -> None:
        name, tokens = fetch.state.request_id, fetch.state.initial_tokens
        # transformers matches all but the last token.
        fetch.num_matched = fetch.state.position_offset = self._cache.search_prefix_match(name, [*tokens, 0])
        missing = len(tokens) - fetch.num_matched
        has_room = missing > 0 and self._batching.scheduler._try_to_meet_safety_margin()
        if has_room and self._cache.can_store_request_tokens(fetch.state, missing):
            fetch.table = self._held.take(name)
            self._start(fetch)
            return
        if fetch.num_matched:
            self._held.free(self._held.take(name))
        resolve(fetch.future, partial(self._released, fetch))

    def _start(self, fetch: _Fetch) -> None:
        landed, failed = partial(self._land, fetch), partial(self._abandon, fetch)
        fetch.running = RunningPull(printable(fetch.ticket.request_id), landed, failed)
        self._running.add(fetch)
        num_tokens = len(fetch.state.initial_tokens)
        self._pulls.start(fetch.running, fetch.ticket, fetch.table, fetch.num_matched, num_tokens)

    def _released(self, fetch: _Fetch) -> int:
        self._worker.release(fetch.ticket)
        return fetch.num_matched

    def _land(self, fetch: _Fetch, error: Exception | None) -> None:
        if fetch not in self._running:
            return
        if error is not None or fetch.future.done():
            self._abandon(fetch, error or Cancelled("the fetch was given up"))
            return
        self._running.remove(fetch)
        num_tokens, name = len(fetch.state.initial_tokens), fetch.state.request_id
        table, fetch.table = fetch.table, ()
        self._held.give(name, table)
        complete = completed(self._batching.attention, fetch.num_matched, num_tokens)
        self._cache.mark_complete_blocks(fetch.state, complete)
        self._held.free(self._held.take(name))  # blocks of a known prefix stay cached
        self.num_fetched += 1
        self.num_bytes += fetch.running.num_bytes if fetch.running else 0
        fetch.future.set_result(num_tokens)

    def _abandon(self, fetch: _Fetch, error: Exception) -> None:
        """Frees the blocks of a prefix, which nothing writes, and fails its future."""
        self._running.discard(fetch)
        table, fetch.table = fetch.table, ()
        if table:
            self._held.free(table)
        if self._held.has(fetch.state.request_id):
            self._held.free(self._held.take(fetch.state.request_id))
        _fail(fetch, error)


def _fail(fetch: _Fetch, error: Exception) -> None:
    if not fetch.future.done():
        fetch.future.set_exception(error)
