# SPDX-License-Identifier: Apache-2.0
"""Implements the prefill side: a finished request keeps its blocks until the lease of its offer ends."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvlink import LeaseEvent, Worker
from kvlink.errors import Cancelled, ConfigError, TransferError

from .attention import Table, blocks_of, by_group
from .batching import Batching, HeldBlocks
from .handoff_message import Handoff, check_tokens, fingerprint
from .support import request_types

_MAX_NAME_BYTES = 400  # a ticket's request id has at most 512, with a number and a hash


@dataclass(slots=True)
class _Prefill:
    prompt: tuple[int, ...]
    future: Future[Handoff] = field(default_factory=Future)
    outcome: Handoff | Exception | None = None


class Outgoing:
    """The requests that this process prefills for another."""

    def __init__(self, batching: Batching, worker: Worker, held: HeldBlocks) -> None:
        self._batching = batching
        self._worker = worker
        self._held = held
        self._status = request_types()[1]
        self._numbers = itertools.count()
        self._prefills: dict[str, _Prefill] = {}
        self._offered: dict[str, Table] = {}

    def prefill(
        self, prompt: Sequence[int], request_id: str | None, options: dict[str, Any]
    ) -> Future[Handoff]:
        """Implements `KVLinkHandoff.prefill`."""
        self._batching.check_accepting()
        request_id = f"prefill-{next(self._numbers)}" if request_id is None else request_id
        prefill = _Prefill(tuple(map(int, prompt)))
        check_tokens(prefill.prompt)
        if not prefill.prompt or len(request_id.encode()) > _MAX_NAME_BYTES:
            raise ConfigError(f"a prefill needs a token and a request id of at most {_MAX_NAME_BYTES} bytes")
        self._batching.check_fits(request_id, len(prefill.prompt))
        prefill.future.set_running_or_notify_cancel()  # it cannot be cancelled from here on
        self._batching.request_ids.reserve(request_id)
        self._prefills[request_id] = prefill
        try:
            added = self._batching.manager.add_request(
                list(prefill.prompt), request_id, max_new_tokens=1, **options
            )
            if added is None:
                raise ConfigError(f"the manager did not accept request {request_id}")
        except BaseException:
            self._forget(request_id)
            raise
        return prefill.future

    # The following methods run on the generation thread.

    def keep(self, request_id: str) -> bool:
        """Offers the blocks of a request that is being freed. Returns False if they may be freed now."""
        prefill = self._prefills.get(request_id)
        if prefill is None:
            return False
        state = self._batching.scheduler.active_requests.get(request_id)
        if state is not None and tuple(state.initial_tokens) != prefill.prompt:
            return False  # one of the manager's own requests has the same id
        if state is None:
            self._forget(request_id)
            prefill.future.set_exception(Cancelled(f"request {request_id} was cancelled"))
            return False
        if state.status != self._status.FINISHED or not self._held.has(request_id):
            return False  # it was preempted and comes back
        table = self._held.take(request_id)
        try:
            prefill.outcome = self._offer(request_id, prefill.prompt, state, table)
        except Exception as error:
            prefill.outcome = error
            self._held.free(table)
        return True

    def deliver(self, output: Any) -> bool:
        """Resolves the future of an output. Returns False if the output belongs to another request."""
        prefill = self._prefills.get(output.request_id)
        if prefill is None or tuple(output.prompt_ids) != prefill.prompt:
            return False
        self._forget(output.request_id)
        if isinstance(prefill.outcome, Handoff):
            prefill.future.set_result(prefill.outcome)
        else:
            failure = TransferError(f"request {output.request_id} was not prefilled: {output.error}")
            prefill.future.set_exception(prefill.outcome or failure)
        return True

    def offer(self, request_id: str, mark: str, table: Table, num_tokens: int) -> str:
        """Offers the first tokens of a table, which is freed when the lease has ended. Returns the ticket's text.

        `mark` ends the request id of the ticket. Raises KVLinkError, and the table stays the caller's.
        """
        name = f"{request_id}#{next(self._numbers)}{mark}"
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
        self._held.free(self._offered.pop(event.request_id))

    def close(self) -> None:
        """Frees all blocks. The worker is closed, so nothing reads them."""
        while self._offered:
            self._held.free(self._offered.popitem()[1])
        while self._prefills:
            request_id, prefill = next(iter(self._prefills.items()))
            self._forget(request_id)
            prefill.future.set_exception(Cancelled(f"request {request_id}: the handoff was closed"))

    def _forget(self, request_id: str) -> None:
        self._prefills.pop(request_id, None)
        self._batching.request_ids.release(request_id)

    def _offer(self, request_id: str, prompt: tuple[int, ...], state: Any, table: Table) -> Handoff:
        first_token = state.to_generation_output().generated_tokens[0]
        logprob = state.logprobs[0] if state.logprobs else None
        ticket = self.offer(request_id, fingerprint(prompt, first_token), table, len(prompt))
        return Handoff(ticket, prompt, first_token, logprob)
