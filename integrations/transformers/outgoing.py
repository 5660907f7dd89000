# SPDX-License-Identifier: Apache-2.0
"""Implements the prefill side: a finished request keeps its blocks until the lease of its offer ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvlink import LeaseEvent, Worker
from kvlink.errors import Cancelled, ConfigError, KVLinkError, TransferError

from ..request_names import name_of, printable
from .attention import Table, blocks_of, by_group
from .batching import Batching, HeldBlocks
from .handoff_message import Handoff, fingerprint, token_ids
from .jobs import Job
from .limits import check_options, check_readable
from .request_ids import taken
from .support import request_types

_MAX_NAME_BYTES = 400  # a ticket's request id has at most 512, with a number and a hash


@dataclass(slots=True, eq=False)
class _Prefill:
    """A prompt that is computed for another process. `state` is its request, which transformers may replace."""

    state: Any
    future: Future[Handoff] = field(default_factory=Future)
    outcome: Handoff | Exception | None = None
    is_scheduled: bool = False


class Outgoing:
    """The requests that this process prefills for another."""

    def __init__(self, batching: Batching, worker: Worker, held: HeldBlocks) -> None:
        self._batching = batching
        self._worker = worker
        self._held = held
        self._new_state, self._status = request_types()
        self._numbers = itertools.count()
        self._prefills: dict[str, _Prefill] = {}
        self._offered: dict[str, Table] = {}

    def prefill(
        self, prompt: Iterable[Any], request_id: str | None, options: dict[str, Any]
    ) -> Future[Handoff]:
        """Implements `KVLinkHandoff.prefill`."""
        self._batching.check_accepting()
        tokens = token_ids(prompt)
        if not tokens:
            raise ConfigError("a prefill needs a token")
        check_readable(self._batching, tokens)
        check_options(self._batching, options)
        self._batching.check_fits(request_id, len(tokens))
        request_id = self._batching.request_ids.reserve(request_id, "prefill")
        prefill = _Prefill(
            self._new_state(request_id, tokens, max_new_tokens=1, logit_processor_kwargs=options)
        )
        prefill.future.set_running_or_notify_cancel()  # it cannot be cancelled from here on
        self._prefills[request_id] = prefill
        job = Job("prefill", request_id, partial(self._begin, prefill), partial(self._fail, prefill))
        try:
            self._batching.jobs.post(job)
        except BaseException:
            self._forget(prefill)
            raise
        return prefill.future

    # The following methods run on the generation thread.

    def _begin(self, prefill: _Prefill) -> None:
        request_id = prefill.state.request_id
        if self._prefills.get(request_id) is not prefill:
            return  # it was cancelled
        if self._batching.request_ids.is_scheduled(request_id):
            self._fail(prefill, taken(request_id))
            return
        prefill.is_scheduled = True
        self._batching.scheduler.add_waiting_request(prefill.state)

    def requeued(self, state: Any) -> None:
        """Notes the state that replaces that of a preempted request."""
        prefill = self._prefills.get(state.request_id)
        if prefill is not None and prefill.is_scheduled:
            prefill.state = state

    def keep(self, request_id: str) -> bool:
        """Offers the blocks of a request that is being freed. Returns False if they may be freed now."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return False
        state = self._batching.scheduler.active_requests.get(request_id)
        if state is None:
            self._fail(prefill, Cancelled(f"request {printable(request_id)} was cancelled"))
            return False
        if (
            state is not prefill.state
            or state.status != self._status.FINISHED
            or not self._held.has(request_id)
        ):
            return False  # it was preempted and comes back
        table = self._held.take(request_id)
        try:
            prefill.outcome = self._offer(state, table)
        except Exception as error:
            if not isinstance(error, KVLinkError):
                self._batching.guard.caught("offer", request_id, error)
            prefill.outcome = error
            self._held.free(table)
        return True

    def deliver(self, output: Any) -> bool:
        """Resolves the future of an output. Returns False if the output belongs to another request."""
        prefill = self._prefills.get(output.request_id)
        if prefill is None or not prefill.is_scheduled or output.status != self._status.FINISHED:
            return False
        if isinstance(prefill.outcome, Handoff):
            self._forget(prefill)
            prefill.future.set_result(prefill.outcome)
        else:
            self._fail(
                prefill,
                prefill.outcome or TransferError(f"request {printable(output.request_id)} has no blocks"),
            )
        return True

    def failed(self, state: Any, error: Exception) -> bool:
        """Fails the future of a request that failed. Returns False if it is another request."""
        prefill = self._prefills.get(state.request_id)
        if prefill is None or prefill.state is not state:
            return False
        name = printable(state.request_id)
        self._fail(prefill, TransferError(f"request {name} was not prefilled: {error}"))
        return True

    def offer(self, request_id: object, mark: str, table: Table, num_tokens: int) -> str:
        """Offers the first tokens of a table, which is freed when the lease has ended. Returns the ticket's text.

        `mark` ends the request id of the ticket. Raises KVLinkError, and the table stays the caller's.
        """
        name = f"{name_of(request_id, _MAX_NAME_BYTES)}#{next(self._numbers)}{mark}"
        caches = self._batching.attention
        ticket = self._worker.offer(
            name,
            by_group(blocks_of(caches, table, num_tokens)),
            num_tokens=[cache.num_slots(num_tokens) for cache in caches],
        )
        self._offered[name] = table
        return ticket.to_text()

    def ended(self, event: LeaseEvent) -> None:
        """Returns the blocks of an offer that ended to transformers."""
        table = self._offered.pop(event.request_id, None)
        if table is not None:
            self._held.free(table)

    def end(self, error: Exception) -> None:
        """Fails what is left when the generation loop has ended."""
        for prefill in list(self._prefills.values()):
            self._fail(prefill, error)

    def close(self) -> None:
        """Frees all blocks. The worker is closed, so nothing reads them."""
        while self._offered:
            self._held.free(self._offered.popitem()[1])
        for request_id, prefill in self._prefills.items():
            if prefill.is_scheduled:  # nobody waits for it any more
                self._batching.scheduler.set_request_cancellation(request_id)
        self.end(Cancelled("the handoff was closed"))

    def _fail(self, prefill: _Prefill, error: Exception) -> None:
        self._forget(prefill)
        if not prefill.future.done():
            prefill.future.set_exception(error)

    def _forget(self, prefill: _Prefill) -> None:
        request_id = prefill.state.request_id
        if self._prefills.get(request_id) is prefill:
            del self._prefills[request_id]
            self._batching.request_ids.release(request_id)

    def _offer(self, state: Any, table: Table) -> Handoff:
        tokens, first_token = tuple(state.initial_tokens), state.generated_tokens[0]
        logprob = state.logprobs[0] if state.logprobs else None
        unoffered = Handoff("", tokens, first_token, logprob)  # raises before a lease is taken
        mark = fingerprint(tokens, first_token)
        return unoffered.with_ticket(self.offer(state.request_id, mark, table, len(tokens)))
