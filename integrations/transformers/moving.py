# SPDX-License-Identifier: Apache-2.0
"""Implements the leaving side of a move: it offers what a running request has cached, then the request itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvlink.errors import ConfigError, TransferError

from ..request_names import printable
from .batching import Batching, HeldBlocks, TableName
from .handoff_message import Handoff, Prefix, fingerprint, prefix_mark, token_ids
from .incoming import Incoming
from .jobs import Job
from .outgoing import Outgoing
from .request_ids import checked_id
from .support import request_types

_T = TypeVar("_T")


class Moving:
    """Requests of this process that go on elsewhere, and prefixes that other processes copy."""

    def __init__(self, batching: Batching, held: HeldBlocks, outgoing: Outgoing, incoming: Incoming) -> None:
        self._batching = batching
        self._held = held
        self._outgoing, self._incoming = outgoing, incoming
        self._status = request_types()[1]
        self.num_moved = 0

    def share(self, source: str | Iterable[Any]) -> Future[Prefix]:
        """Implements `KVLinkHandoff.share`."""
        check_shares(self._batching)
        if isinstance(source, str):
            return self._later("share", source, partial(self._share_request, source))
        return self._later("share", "given tokens", partial(self._share_tokens, token_ids(source)))

    def move(self, request_id: str) -> Future[Handoff]:
        """Implements `KVLinkHandoff.move`."""
        if self._batching.processor.use_async_batching:
            raise ConfigError(
                "a request cannot be moved while batches run asynchronously; set use_async_batching=False"
            )
        return self._later("move", request_id, partial(self._move, checked_id(request_id)))

    def _later(self, kind: str, request_id: str, work: Callable[[], _T]) -> Future[_T]:
        self._batching.check_accepting()
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        job = Job(kind, request_id, partial(resolve, future, work), future.set_exception)
        self._batching.jobs.post(job)
        return future

    # The following methods run on the generation thread.

    def _share_request(self, request_id: str) -> Prefix:
        return self._share(self._tokens_so_far(request_id)) or Prefix("", ())

    def _share_tokens(self, tokens: list[int]) -> Prefix:
        prefix = self._share(tokens)
        if prefix is None:
            raise TransferError("no whole block of these tokens is cached here")
        return prefix

    def _share(self, tokens: list[int]) -> Prefix | None:
        """Offers the whole blocks at the start of `tokens` that are cached. Returns None if there are none."""
        name, cache = TableName("a shared prefix"), self._batching.cache
        # transformers matches all but the last token.
        num_tokens = cache.search_prefix_match(name, [*tokens, 0])
        if not num_tokens:
            return None
        table, shared = self._held.take(name), tuple(tokens[:num_tokens])
        try:
            ticket = self._outgoing.offer("kvlink-share", prefix_mark(shared), table, num_tokens)
        except BaseException:
            self._held.free(table)
            raise
        return Prefix(ticket, shared)

    def _tokens_so_far(self, request_id: str) -> list[int]:
        state = self._batching.scheduler.active_requests.get(request_id)
        if state is None:
            raise TransferError(f"request {printable(request_id)} does not run here")
        return token_ids([*state.initial_tokens, *state.generated_tokens])

    def _move(self, request_id: str) -> Handoff:
        state = self._batching.scheduler.active_requests.get(request_id)
        if state is None or state.status != self._status.DECODING or not self._held.has(request_id):
            raise TransferError(
                f"request {printable(request_id)} does not generate here: it has ended, or waits, or computes its "
                "prompt"
            )
        *stored, newest = self._tokens_so_far(request_id)
        if state.position_offset != len(stored):
            raise TransferError(
                f"request {printable(request_id)} has tokens that are not computed; move it later"
            )
        num_generated = len(stored) - (state._true_initial_tokens or len(state.initial_tokens))
        *earlier, logprob = state.logprobs or [None]
        unoffered = Handoff("", tuple(stored), newest, logprob, num_generated, tuple(earlier))
        table = self._held.take(request_id)
        try:
            mark = fingerprint(stored, newest, num_generated)
            handoff = unoffered.with_ticket(self._outgoing.offer(request_id, mark, table, len(stored)))
        except BaseException:
            self._held.give(request_id, table)  # it goes on here
            raise
        self._end(request_id, state)
        return handoff

    def _end(self, request_id: str, state: Any) -> None:
        self._incoming.forget(request_id)
        del self._batching.scheduler.active_requests[request_id]
        self.num_moved += 1
        try:
            moved = TransferError(f"request {printable(request_id)} was moved to another process")
            self._batching.outputs.fail_and_deliver(state, moved)
        except Exception as error:  # the client's event loop is closed; the request has moved
            self._batching.guard.caught("report of a move", request_id, error)


def check_shares(batching: Batching) -> None:
    """Raises ConfigError for a cache that keeps no prefixes."""
    if not batching.cache.use_prefix_sharing:
        raise ConfigError(
            "this cache keeps no prefixes: the model has sliding windows, or allow_block_sharing is off; "
            "move the request without copies before"
        )


def resolve(future: Future[_T], work: Callable[[], _T]) -> None:
    """Gives a future what `work` returns or raises."""
    try:
        result = work()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)
