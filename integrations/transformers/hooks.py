# SPDX-License-Identifier: Apache-2.0
"""Replaces the methods of transformers through which a handoff takes part in continuous batching.

An exception that left one of them would end the generation loop, and with it every request of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from .batching import Batching, HeldBlocks
from .fetching import Fetching
from .incoming import Incoming
from .outgoing import Outgoing
from .request_ids import taken


class Hooks:
    """The replacements, each of which gets the method that it replaces."""

    def __init__(
        self,
        batching: Batching,
        held: HeldBlocks,
        outgoing: Outgoing,
        incoming: Incoming,
        fetching: Fetching,
    ) -> None:
        self._batching, self._held = batching, held
        self._outgoing, self._incoming, self._fetching = outgoing, incoming, fetching

    def install(self) -> None:
        """Replaces the methods until `Batching.unhook`, while no batch runs. Raises ConfigError if one is replaced."""
        hook, parts = self._batching.hook, self._batching
        hook(parts.processor, "prepare_next_batch", self._prepare)
        hook(parts.processor, "has_pending_requests", self._has_pending)
        hook(parts.scheduler, "schedule_batch", self._schedule)
        hook(parts.scheduler, "add_waiting_request", self._add_waiting)
        hook(parts.cache, "free_blocks", self._free)
        hook(parts.outputs, "deliver", self._deliver)
        hook(parts.outputs, "deliver_batch", self._deliver_batch)
        hook(parts.outputs, "fail_and_deliver", self._fail_and_deliver)
        hook(parts.manager.background_thread_status, "mark_as_stopped", self._mark_as_stopped)

    # The following methods run on the generation thread.

    def _prepare(self, prepare: Callable[[], bool]) -> bool:
        self._batching.jobs.run()
        self._incoming.admit()
        return prepare()

    def _has_pending(self, has_pending: Callable[[], bool]) -> bool:
        """Returns whether a manager that stops has to run another round."""
        return has_pending() or len(self._batching.jobs) > 0 or self._fetching.num_running > 0

    def _mark_as_stopped(self, mark: Callable[[], None]) -> None:
        """Ends all that the loop has left undone. Jobs are refused from `mark` on."""
        mark()
        why = self._batching.why_ended
        self._batching.jobs.end(why)
        for part in (self._outgoing, self._incoming, self._fetching):
            self._batching.guarded("end of the loop", None, partial(part.end, why()))

    def _add_waiting(self, add: Callable[[Any], None], state: Any) -> None:
        """Adds a request, or fails it alone if it has the id of another, whose table it would overwrite."""
        if self._batching.request_ids.is_scheduled(state.request_id):
            fail = partial(self._batching.outputs.fail_and_deliver, state, taken(state.request_id))
            self._batching.guarded("refusal", state.request_id, fail)
            return
        self._batching.guarded("preemption", state.request_id, partial(self._outgoing.requeued, state))
        add(state)

    def _free(self, free: Callable[[Any, bool], None], request_id: Any, no_cache: bool = False) -> None:
        if not self._batching.guarded("offer", request_id, partial(self._outgoing.keep, request_id)):
            self._batching.guarded("end of a request", request_id, partial(self._incoming.forget, request_id))
            free(request_id, no_cache)

    def _deliver(self, deliver: Callable[[Any], None], output: Any) -> None:
        if not self._is_prefill(output):
            self._batching.guarded("delivery", output.request_id, partial(deliver, output))

    def _deliver_batch(self, deliver_batch: Callable[[list[Any]], None], outputs: list[Any]) -> None:
        """Delivers outputs. It raises for a client whose event loop is closed, which concerns no other client."""
        others = [output for output in outputs if not self._is_prefill(output)]
        self._batching.guarded("delivery", None, partial(deliver_batch, others))

    def _is_prefill(self, output: Any) -> bool:
        delivered = self._batching.guarded(
            "answer", output.request_id, partial(self._outgoing.deliver, output)
        )
        return bool(delivered)

    def _fail_and_deliver(
        self, fail_and_deliver: Callable[[Any, Exception], None], state: Any, error: Exception
    ) -> None:
        if not self._batching.guarded(
            "failure", state.request_id, partial(self._outgoing.failed, state, error)
        ):
            fail_and_deliver(state, error)

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
