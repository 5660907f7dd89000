# SPDX-License-Identifier: Apache-2.0
"""Implements the leaving side of a move: it offers what a running request has cached, then the request itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from kvlink.errors import ConfigError, TransferError

from .batching import Batching, HeldBlocks
from .handoff_message import Handoff, Prefix, check_tokens, fingerprint, prefix_mark
from .incoming import Incoming
from .outgoing import Outgoing
from .support import request_types

_T = TypeVar("_T")


class Moving:
    """Requests of this process that go on elsewhere, and prefixes that other processes copy."""

    def __init__(self, batching: Batching, held: HeldBlocks, outgoing: Outgoing, incoming: Incoming) -> None:
        self._batching = batching
        self._held = held
        self._outgoing, self._incoming = outgoing, incoming
        self._status = request_types()[1]
        self._names = (f"kvlink-share-{number}" for number in itertools.count())
        self.num_moved = 0

    def share(self, source: str | Sequence[int]) -> Future[Prefix]:
        """Implements `KVLinkHandoff.share`."""
        check_shares(self._batching)
        if not isinstance(source, str):
            source = list(map(int, source))
            check_tokens(source)
        return self._later(partial(self._share, source))

    def move(self, request_id: str) -> Future[Handoff]:
        """Implements `KVLinkHandoff.move`."""
        if self._batching.processor.use_async_batching:
            raise ConfigError(
                "a request cannot be moved while batches run asynchronously; set use_async_batching=False"
            )
        return self._later(partial(self._move, request_id))

    def _later(self, work: Callable[[], _T]) -> Future[_T]:
        self._batching.check_accepting()
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()
        self._batching.post(partial(resolve, future, work))
        return future

    # The following methods run on the generation thread.

    def _share(self, source: str | list[int]) -> Prefix:
        tokens = self._tokens_so_far(source) if isinstance(source, str) else source
        name, cache = next(self._names), self._batching.cache
        # transformers matches all but the last token.
        num_tokens = cache.search_prefix_match(name, [*tokens, 0])
        if not num_tokens:
            raise TransferError("no whole block of these tokens is cached here")
        table = self._held.take(name)
        try:
            ticket = self._outgoing.offer(name, prefix_mark(tokens[:num_tokens]), table, num_tokens)
        except BaseException:
            self._held.free(table)
            raise
        return Prefix(ticket, tuple(tokens[:num_tokens]))

    def _tokens_so_far(self, request_id: str) -> list[int]:
        state = self._batching.scheduler.active_requests.get(request_id)
        if state is None:
            raise TransferError(f"request {request_id} does not run here")
        return [*state.initial_tokens, *state.generated_tokens]

    def _move(self, request_id: str) -> Handoff:
        state = self._batching.scheduler.active_requests.get(request_id)
        if state is None or state.status != self._status.DECODING or not self._held.has(request_id):
            raise TransferError(
                f"request {request_id} does not generate here: it has ended, or waits, or computes its prompt"
            )
        *stored, newest = self._tokens_so_far(request_id)
        num_generated = len(stored) - (state._true_initial_tokens or len(state.initial_tokens))
        *earlier, logprob = state.logprobs or [None]
        table = self._held.take(request_id)
        try:
            if state.position_offset != len(stored):
                raise TransferError(f"request {request_id} has tokens that are not computed; move it later")
            mark = fingerprint(stored, newest, num_generated)
            ticket = self._outgoing.offer(request_id, mark, table, len(stored))
        except BaseException:
            self._held.give(request_id, table)  # it goes on here
            raise
        self._end(request_id, state)
        return Handoff(ticket, tuple(stored), newest, logprob, num_generated, tuple(earlier))

    def _end(self, request_id: str, state: Any) -> None:
        self._incoming.forget(request_id)
        del self._batching.scheduler.active_requests[request_id]
        moved = TransferError(f"request {request_id} was moved to another process")
        self._batching.outputs.fail_and_deliver(state, moved)
        self.num_moved += 1


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
