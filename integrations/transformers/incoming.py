# SPDX-License-Identifier: Apache-2.0
"""Implements the decode side: it pulls blocks in the background, and the request then joins the batch.

Meanwhile a request is active and pending: the manager knows it, so that it can be cancelled and keeps a stopping
manager running, and no scheduler puts it into a batch.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from kvlink import Pull, Ticket, Worker
from kvlink.background import ControlThread
from kvlink.errors import Cancelled, ConfigError, LayoutMismatch

from .attention import Table, blocks_of, by_group, completed
from .batching import Batching, HeldBlocks
from .handoff_message import Handoff
from .support import request_types

_log = logging.getLogger("kvlink.transformers")


@dataclass(frozen=True, slots=True)
class Landed:
    """A handoff that was received: its pull and the blocks it wrote, or why its prompt is computed here instead."""

    request_id: str
    block_ids: tuple[int, ...]
    pull: Pull | None
    error: Exception | None


@dataclass(slots=True, eq=False)
class _Arrival:
    """A request whose blocks are being pulled.

    `num_matched` tokens at the start of the prompt were found in this process's own cache.
    """

    state: Any
    ticket: Ticket
    handoff: Handoff
    table: Table = ()
    num_matched: int = 0
    pull: Pull | None = None
    cancelled: bool = False


class Incoming:
    """The requests that another process prefilled."""

    def __init__(
        self, batching: Batching, worker: Worker, held: HeldBlocks, background: ControlThread
    ) -> None:
        self._batching = batching
        self._scheduler, self._cache = batching.scheduler, batching.cache
        self._worker = worker
        self._held = held
        self._background = background
        self._status = request_types()[1]
        self._waiting: deque[_Arrival] = deque()
        self._arrivals: dict[str, _Arrival] = {}
        self._pulling: set[_Arrival] = set()
        self._adopted: set[str] = set()  # requests that generate from pulled blocks
        self.num_pulled = self.num_recomputed = self.num_refused = self.num_bytes = 0
        self.newest: Landed | None = None

    def submit(self, state: Any, ticket: Ticket, handoff: Handoff) -> None:
        """Queues a request. Raises ConfigError for one that could never run here. Everything else happens later."""
        self._batching.check_accepting()
        self._batching.processor.logit_processor.check_kwargs(state.logit_processor_kwargs)
        request_id = state.request_id
        if request_id in self._scheduler.active_requests or request_id in self._scheduler.waiting_requests:
            raise ConfigError(f"request {request_id} already runs here; give each request its own request_id")
        num_tokens = len(handoff.prompt)
        if ticket.num_tokens != self._num_slots(num_tokens) or not num_tokens:
            raise ConfigError(
                f"the ticket of {ticket.request_id} has {ticket.num_tokens} tokens, and of a prompt of {num_tokens} "
                f"this model's cache keeps {self._num_slots(num_tokens)}; run the same model with the same sliding "
                "window at both ends"
            )
        # The last token is not stored. Without a limit the number of new tokens is unknown.
        self._batching.check_fits(request_id, num_tokens + max((state.max_new_tokens or 2) - 1, 0))
        self._batching.request_ids.reserve(request_id)
        self._batching.post(partial(self._arrive, _Arrival(state, ticket, handoff)))

    # The following methods run on the generation thread.

    def admit(self) -> None:
        """Starts the pulls of arrivals for which blocks are free, in order."""
        while self._waiting and (self._waiting[0].cancelled or self._allocate(self._waiting[0])):
            arrival = self._waiting.popleft()
            if not arrival.cancelled:
                self._background.submit(self._pull(arrival))

    def forget(self, request_id: str) -> None:
        """Forgets a request that ended, was cancelled or failed. Its blocks are free once nothing writes to them."""
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None or request_id in self._adopted:
            self._adopted.discard(request_id)
            self._batching.request_ids.release(request_id)
        if arrival is not None:
            arrival.cancelled = True
            self._background.loop.call_soon_threadsafe(_cancel, arrival)

    def close(self) -> None:
        """Recomputes requests that have not arrived, or fails them if nothing generates. Afterwards no pull runs."""
        closed = Cancelled("the handoff was closed")
        if not self._batching.manager.is_running():
            while self._arrivals:
                self._fail(self._arrivals.popitem()[1].state, closed)
        for arrival in [*self._pulling, *self._waiting]:
            self._land(arrival, closed)
        self._waiting.clear()

    def _num_slots(self, num_tokens: int) -> int:
        return max(cache.num_slots(num_tokens) for cache in self._batching.attention)

    def _arrive(self, arrival: _Arrival) -> None:
        self._scheduler.active_requests[arrival.state.request_id] = arrival.state
        self._arrivals[arrival.state.request_id] = arrival
        self._waiting.append(arrival)

    def _allocate(self, arrival: _Arrival) -> bool:
        state, num_tokens = arrival.state, len(arrival.handoff.prompt)
        is_roomy = self._scheduler._try_to_meet_safety_margin()
        if not is_roomy and len(self._scheduler.active_requests) > len(self._arrivals):
            return False  # the remaining blocks are for generating requests, as in transformers' scheduler
        arrival.num_matched = self._cache.search_prefix_match(state.request_id, state.initial_tokens)
        state.position_offset = arrival.num_matched
        num_missing = num_tokens - arrival.num_matched
        stored = self._cache.can_store_request_tokens(state, num_missing) or (
            self._cache.evict_cached_blocks() and self._cache.can_store_request_tokens(state, num_missing)
        )
        if stored:
            arrival.table = self._held.take(state.request_id)
            self._pulling.add(arrival)
        elif arrival.num_matched:
            self._held.free(self._held.take(state.request_id))
        return bool(stored)

    def _land(self, arrival: _Arrival, error: Exception | None) -> None:
        request_id = arrival.state.request_id
        is_wanted = self._arrivals.get(request_id) is arrival
        if arrival in self._pulling:
            self._pulling.remove(arrival)
            if is_wanted and error is None:
                self._adopt(arrival)
            else:
                self._held.free(arrival.table)
        if is_wanted:
            del self._arrivals[request_id]
            self.newest = Landed(request_id, tuple(chain(*arrival.table)), arrival.pull, error)
            if isinstance(error, LayoutMismatch):
                self._refuse(arrival, error)
            else:
                self._join(arrival, error)

    def _refuse(self, arrival: _Arrival, error: LayoutMismatch) -> None:
        """Fails a request of another model, whose first token is not this model's."""
        self.num_refused += 1
        _log.warning(
            "refuses request=%s ticket=%s error=%r",
            arrival.state.request_id,
            arrival.ticket.request_id,
            error,
        )
        self._fail(arrival.state, error)

    def _fail(self, state: Any, error: Exception) -> None:
        self._batching.request_ids.release(state.request_id)
        self._batching.outputs.fail_and_deliver(state, error)
        self._scheduler.finish_request(state.request_id)

    def _join(self, arrival: _Arrival, error: Exception | None) -> None:
        state, request_id = arrival.state, arrival.state.request_id
        state.position_offset = len(arrival.handoff.prompt)
        state.remaining_prefill_tokens = []
        state.status = self._status.DECODING
        ended = state.update_and_check_completion(arrival.handoff.first_token, arrival.handoff.first_logprob)
        if ended or error is not None:
            self._scheduler.finish_request(request_id)
        if error is not None:
            self._batching.request_ids.release(request_id)  # from here on it is an ordinary request
            self.num_recomputed += 1
            _log.warning(
                "recomputes request=%s ticket=%s error=%r", request_id, arrival.ticket.request_id, error
            )
            if not ended:
                self._scheduler.add_waiting_request(state.create_equivalent_initial_request())
        if ended or state.streaming:
            self._batching.outputs.deliver(state.to_generation_output())

    def _adopt(self, arrival: _Arrival) -> None:
        self._held.give(arrival.state.request_id, arrival.table)
        self._adopted.add(arrival.state.request_id)
        if self._cache.use_prefix_sharing:  # from here on other prompts with the same start find these blocks
            num_tokens = len(arrival.handoff.prompt)
            complete = completed(self._batching.attention, arrival.num_matched, num_tokens)
            self._cache.mark_complete_blocks(arrival.state, complete)
        self.num_pulled += 1

    # The following methods run on the background thread.

    async def _pull(self, arrival: _Arrival) -> None:
        error: Exception | None = None
        num_tokens = len(arrival.handoff.prompt)
        caches = self._batching.attention
        blocks = blocks_of(caches, arrival.table, num_tokens)
        ranges = [(arrival.num_matched, cache.num_slots(num_tokens)) for cache in caches]
        try:
            if not arrival.cancelled:
                arrival.pull = self._worker.pull(arrival.ticket, by_group(blocks), tokens=by_group(ranges))
                self.num_bytes += (await arrival.pull).num_bytes
                _log_path(arrival.state.request_id, arrival.pull)
        except Exception as failed:
            error = failed
        self._batching.post(partial(self._land, arrival, error))


def _log_path(request_id: str, pull: Pull) -> None:
    if _log.isEnabledFor(logging.INFO):
        _log.info("pulled request=%s %s", request_id, "; ".join(map(str, pull.explain())))


def _cancel(arrival: _Arrival) -> None:
    if arrival.pull is not None:
        arrival.pull.cancel()
