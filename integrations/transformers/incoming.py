# SPDX-License-Identifier: Apache-2.0
"""Implements the decode side: it pulls blocks in the background, and the request then joins the batch.

Meanwhile a request is active and pending: the manager knows it, so that it can be cancelled and keeps a stopping
manager running, and no scheduler puts it into a batch.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from kvlink import Pull, Ticket
from kvlink.errors import Cancelled, ConfigError, LayoutMismatch

from ..request_names import printable
from .attention import Table, completed
from .batching import Batching, HeldBlocks
from .handoff_message import Handoff
from .jobs import Job
from .limits import check_options, check_readable
from .pulls import Pulls, RunningPull
from .request_ids import taken
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

    `num_matched` tokens at the start of the prompt were found in this process's own cache. `table` is empty unless
    kvlink holds blocks for it.
    """

    state: Any
    ticket: Ticket
    handoff: Handoff
    table: Table = ()
    num_matched: int = 0
    running: RunningPull | None = None
    cancelled: bool = False


class Incoming:
    """The requests that another process prefilled."""

    def __init__(self, batching: Batching, held: HeldBlocks, pulls: Pulls) -> None:
        self._batching = batching
        self._scheduler, self._cache = batching.scheduler, batching.cache
        self._held, self._pulls = held, pulls
        self._status = request_types()[1]
        self._waiting: deque[_Arrival] = deque()
        self._arrivals: dict[str, _Arrival] = {}  # until they have landed
        self._pulling: set[_Arrival] = set()
        self._adopted: set[str] = set()  # requests that generate from pulled blocks
        self.num_pulled = self.num_recomputed = self.num_refused = self.num_bytes = 0
        self.newest: Landed | None = None

    def submit(self, new_state: Callable[[str], Any], request_id: str | None, handoff: Handoff) -> str:
        """Queues a request and returns its id. Raises ConfigError for one that could never run here.

        `new_state` makes the state of a request of this id. Everything else happens later.
        """
        self._batching.check_accepting()
        ticket = self._checked(request_id, handoff)
        request_id = self._batching.request_ids.reserve(request_id, "handoff")
        try:
            state = new_state(request_id)
            check_options(self._batching, state.logit_processor_kwargs)
            self._check_room(state, len(handoff.prompt))
            arrival = self._arrivals[request_id] = _Arrival(state, ticket, handoff)
            job = Job("submit", request_id, partial(self._arrive, arrival), partial(self._reject, arrival))
            self._batching.jobs.post(job)
        except BaseException:
            self._arrivals.pop(request_id, None)
            self._batching.request_ids.release(request_id)
            raise
        return request_id

    def _checked(self, request_id: str | None, handoff: Handoff) -> Ticket:
        """Compares a handoff with its ticket and with this process's cache. Afterwards nothing in it can raise."""
        ticket, caches = handoff.open_ticket(), self._batching.attention
        check_readable(self._batching, [*handoff.prompt, handoff.first_token])
        num_tokens = len(handoff.prompt)
        num_slots = max(cache.num_slots(num_tokens) for cache in caches)
        offered = printable(ticket.request_id)
        if ticket.num_tokens != num_slots or not num_tokens:
            raise ConfigError(
                f"the ticket of {offered} has {ticket.num_tokens} tokens, and of a prompt of {num_tokens} this model's "
                f"cache keeps {num_slots}; run the same model with the same sliding window at both ends"
            )
        if len(ticket.groups()) != len(caches):
            raise ConfigError(
                f"the ticket of {offered} has {len(ticket.groups())} cache groups, and this model has {len(caches)}; "
                "run the same model at both ends"
            )
        return ticket

    def _check_room(self, state: Any, num_tokens: int) -> None:
        """Raises ConfigError for a request that does not fit the cache. The last token is not stored."""
        self._batching.check_fits(state.request_id, num_tokens)
        self._batching.check_fits(state.request_id, num_tokens + state.max_new_tokens - 1)

    # The following methods run on the generation thread.

    def admit(self) -> None:
        """Starts the pulls of arrivals for which blocks are free, in order."""
        while self._waiting and self._admitted(self._waiting[0]):
            self._waiting.popleft()

    def forget(self, request_id: str) -> None:
        """Forgets a request that ended, was cancelled or failed. Its blocks are free once nothing writes to them."""
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None or request_id in self._adopted:
            self._adopted.discard(request_id)
            self._batching.request_ids.release(request_id)
        if arrival is not None:
            arrival.cancelled = True
            if arrival.running is not None:
                self._pulls.cancel(arrival.running)

    def end(self, error: Exception) -> None:
        """Fails what transformers has not failed when its loop ended. Pulls end by themselves."""
        for arrival in list(self._arrivals.values()):
            self.forget(arrival.state.request_id)
            self._fail(arrival.state, error)

    def close(self) -> None:
        """Recomputes requests that have not arrived, or fails them if nothing generates. Afterwards no pull runs."""
        closed = Cancelled("the handoff was closed")
        if not self._batching.lives:
            self.end(closed)
        for arrival in [*self._pulling, *self._waiting]:
            self._land_safely(arrival, closed)
        self._waiting.clear()

    def _arrive(self, arrival: _Arrival) -> None:
        if arrival.cancelled:
            return
        if self._batching.request_ids.is_scheduled(arrival.state.request_id):
            self._reject(arrival, taken(arrival.state.request_id))
            return
        self._scheduler.active_requests[arrival.state.request_id] = arrival.state
        self._waiting.append(arrival)

    def _reject(self, arrival: _Arrival, error: Exception) -> None:
        """Fails a request that did not begin. If only the handoff was closed, its prompt is computed here."""
        if isinstance(error, Cancelled) and self._batching.lives:
            self._arrive(arrival)
            return
        if self._arrivals.get(arrival.state.request_id) is arrival:
            del self._arrivals[arrival.state.request_id]
            self._batching.request_ids.release(arrival.state.request_id)
            self._batching.outputs.fail_and_deliver(arrival.state, error)

    def _admitted(self, arrival: _Arrival) -> bool:
        """Returns False if the arrival has to wait for blocks."""
        try:
            if not arrival.cancelled:
                if not self._allocate(arrival):
                    return False
                self._start(arrival)
        except ConfigError as error:  # the handoff is being closed
            self._land_safely(arrival, error)
        except Exception as error:
            self._batching.guard.caught("admit", arrival.state.request_id, error)
            self._abandon(arrival, error)
        return True

    def _allocate(self, arrival: _Arrival) -> bool:
        state, num_tokens = arrival.state, len(arrival.handoff.prompt)
        is_roomy = self._scheduler._try_to_meet_safety_margin()
        if not is_roomy and len(self._scheduler.active_requests) > self._num_absent():
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

    def _start(self, arrival: _Arrival) -> None:
        landed, failed = partial(self._land, arrival), partial(self._abandon, arrival)
        arrival.running = RunningPull(arrival.state.request_id, landed, failed)
        num_tokens = len(arrival.handoff.prompt)
        self._pulls.start(arrival.running, arrival.ticket, arrival.table, arrival.num_matched, num_tokens)

    def _num_absent(self) -> int:
        """Returns how many active requests have no blocks to generate from yet."""
        return sum(not arrival.cancelled for arrival in [*self._pulling, *self._waiting])

    def _land(self, arrival: _Arrival, error: Exception | None) -> None:
        request_id, block_ids = arrival.state.request_id, tuple(chain(*arrival.table))
        is_wanted = self._arrivals.get(request_id) is arrival
        if arrival in self._pulling:
            self._pulling.remove(arrival)
            if is_wanted and error is None:
                self._adopt(arrival)
            else:
                self._free(arrival)
        if is_wanted:
            del self._arrivals[request_id]
            pull = arrival.running.pull if arrival.running else None
            self.newest = Landed(request_id, block_ids, pull, error)
            if isinstance(error, LayoutMismatch):
                self._refuse(arrival, error)
            else:
                self._join(arrival, error)

    def _land_safely(self, arrival: _Arrival, error: Exception) -> None:
        try:
            self._land(arrival, error)
        except Exception as another:
            self._batching.guard.caught("landing", arrival.state.request_id, another)
            self._abandon(arrival, another)

    def _free(self, arrival: _Arrival) -> None:
        table, arrival.table = arrival.table, ()
        if table:
            self._held.free(table)

    def _abandon(self, arrival: _Arrival, error: Exception) -> None:
        """Fails a request after an unexpected error, and frees its blocks. Nothing writes to them."""
        self._pulling.discard(arrival)
        self._free(arrival)
        if not arrival.cancelled:
            self.forget(arrival.state.request_id)
            self._fail(arrival.state, error)

    def _refuse(self, arrival: _Arrival, error: LayoutMismatch) -> None:
        """Fails a request of another model, whose first token is not this model's."""
        self.num_refused += 1
        _log.warning("refuses request=%s ticket=%s error=%r", *_names(arrival), error)
        self._batching.request_ids.release(arrival.state.request_id)
        self._fail(arrival.state, error)

    def _fail(self, state: Any, error: Exception) -> None:
        try:
            self._batching.outputs.fail_and_deliver(state, error)
        finally:
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
            _log.warning("recomputes request=%s ticket=%s error=%r", *_names(arrival), error)
            if not ended:
                self._scheduler.add_waiting_request(state.create_equivalent_initial_request())
        if ended or state.streaming:
            self._batching.outputs.deliver(state.to_generation_output())

    def _adopt(self, arrival: _Arrival) -> None:
        table, arrival.table = arrival.table, ()
        self._held.give(arrival.state.request_id, table)
        self._adopted.add(arrival.state.request_id)
        if self._cache.use_prefix_sharing:  # from here on other prompts with the same start find these blocks
            num_tokens = len(arrival.handoff.prompt)
            complete = completed(self._batching.attention, arrival.num_matched, num_tokens)
            self._cache.mark_complete_blocks(arrival.state, complete)
        self.num_pulled += 1
        self.num_bytes += arrival.running.num_bytes if arrival.running else 0


def _names(arrival: _Arrival) -> tuple[str, str]:
    return printable(arrival.state.request_id), printable(arrival.ticket.request_id)
