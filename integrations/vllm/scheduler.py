# SPDX-License-Identifier: Apache-2.0
"""Implements the scheduler's side, in the engine's process: it decides which requests are handed off or loaded.

It is called between steps; nothing here waits or does I/O. Requests and blocks are vLLM's own.

An exception that left one of these methods would end the engine. So each is kept inside its request, whose reservations
are undone: it is computed here, or not handed off. Two may leave: those of code that establishes which offered blocks
get new content, and those of a reset, which vLLM reports to its caller.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from kvlink.ticket import LeaseSeat

from ..request_guard import RequestGuard
from ..request_names import name_of, printable
from .chats.turns import Turns
from .decode.incoming import Incoming
from .model.caches import Rank
from .model.prompt_inputs import features_of, has_embeddings
from .model.states import Stateful, States
from .model.windows import Windows, first_gap
from .prefill.announcements import Announcements
from .prefill.lease_slots import SentTickets, SlotGroups
from .prefill.outgoing import Chunk, GroupIds, Outgoing
from .stream_decisions import StreamDecisions
from .wire.boundary import take_params
from .wire.handoff import KEY, Handoff, RankInfo, expanded, prompt_digest
from .wire.handoff_parts import ANNOUNCED
from .wire.step_commands import HandedOff, Load, StepCommands
from .wire.traces import Traces

_log = logging.getLogger("vllm.kvlink")

_NOT_HANDED_OFF = {
    "embeddings": "its client sent embeddings, which are no part of the digest that binds a handoff to its prompt",
    "no_workers": "the workers have not reported yet, because MultiConnector passed another connector's handshake",
    "no_lease_slot": "every lease slot is taken; raise KVLINK_LEASE_SLOTS",
}


class SchedulerSide:
    """Combines both roles: a request says which side of a handoff it is on. `incoming` has those that decode pulls.

    `slots` are the lease slots of every worker. `select` picks the transferred groups from vLLM's block ids. `own` is
    the RankInfo of any of this server's ranks. `may_send` is False for a kv_consumer. `announcements` is None without a
    coordinator. Prompts of at least `streaming_from` tokens are handed off in parts. `grows` is that of Outgoing.
    `windows` and `states` are those of the transferred groups. `streams_always` is that of Settings. `turns` are those
    of its chats. `back_off` is that of Stateful.
    """

    def __init__(
        self,
        engine_id: str,
        slots: SlotGroups,
        select: Callable[[Sequence[list[int]]], GroupIds],
        lease_s: float,
        own: Rank,
        *,
        may_send: bool = True,
        announcements: Announcements | None = None,
        streaming_from: int = 0,
        grows: Sequence[bool] = (),
        windows: Windows = (),
        states: Sequence[States | None] = (),
        streams_always: bool = False,
        turns: Turns | None = None,
        back_off: int = 0,
    ) -> None:
        self._engine_id = engine_id
        self._slots = slots
        self._select = select
        self._lease_s = lease_s
        self._may_send = may_send
        self._announcements = announcements
        self._ranks: tuple[RankInfo, ...] = ()
        self._changed_at = 0.0
        """When the weights were changed, as seconds since 1970. What arrived before is not offered to others."""
        self._seats: dict[str, tuple[LeaseSeat, ...]] = {}
        self._commands = StepCommands()
        self._traces = Traces()
        self._sent = SentTickets()
        self.counts: Counter[str] = Counter()
        """Handoffs that were not used since the last `take_counts`, by reason."""
        self.guard = RequestGuard(_log)
        self._windows = windows
        self._stateful = Stateful(states, back_off, windows)
        self.decisions = StreamDecisions(always=streams_always)
        self.incoming = Incoming(
            own,
            announcements,
            self._digest,
            self.counts,
            windows,
            self._stateful.any,
            self.decisions,
            self.guard,
            back_off,
        )
        self._outgoing = Outgoing(announcements, streaming_from, grows, lease_s, self.decisions, self.guard)
        self.turns = turns or Turns()
        self.turns.use_costs(self.decisions.cost_of)

    def set_ranks(self, ranks: Iterable[RankInfo]) -> None:
        """Stores the workers of this server, by tensor-parallel rank."""
        before, self._ranks = self._ranks, tuple(ranks)
        if before and self._ranks and before[0].model != self._ranks[0].model:
            self._changed_at = time.time()
            self.turns.model_changed()
        self.incoming.layout = self._ranks[0] if self._ranks else None
        for calls in (self._announcements, self.turns.peers):
            if calls is not None and self._ranks:
                calls.secret = self._ranks[0].secret

    def arrived(self, request: Any) -> None:
        """Registers a request, before it is scheduled. From now on decode's lease at prefill is kept alive."""
        try:
            params = take_params(request)
            self.incoming.arrived(request)
            self.turns.arrived(request)
            if self._may_send and params.get("do_remote_decode"):
                self._stateful.shorten(request)
        except Exception as error:
            self._abandon("arrival", request, error)

    def num_matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Returns the tokens to load beyond those computed, and whether in the background. None: not known yet."""
        try:
            earlier = self.turns.num_matched(request, num_computed, self._ranks)
            if earlier == 0:
                return self.incoming.num_matched(request, num_computed)
        except Exception as error:
            self._abandon("lookup", request, error)
            return 0, False
        return earlier, earlier is not None

    def allocated(self, request: Any, block_ids: GroupIds, num_external: int) -> None:
        """Starts the load of `num_external` tokens, for which blocks exist now."""
        try:
            self._allocated(request, block_ids, num_external)
        except Exception as error:
            self._abandon("allocation", request, error)
        if num_external and not any(load.request_id == request.request_id for load in self._commands.loads):
            self._commands.loads.append(_failed_load(request, num_external))  # vLLM waits for its end

    def _allocated(self, request: Any, block_ids: GroupIds, num_external: int) -> None:
        params = request.kv_transfer_params
        selected = self._select(block_ids)
        into = tuple(array("I", group) for group in self._stateful.holding(selected))
        if self.turns.begins(request, into, num_external, self._commands) or not params:
            return  # it is handed off once it is loaded, and vLLM calls this again
        if params.get("do_remote_decode") and self._may_send:
            self._grant(request, selected)
        self.incoming.allocated(request, into, num_external, self._commands)

    def scheduled(
        self, chunks: Mapping[str, Chunk] | Callable[[], Mapping[str, Chunk]], preempted: Iterable[str]
    ) -> None:
        """Handles what the step computes, and which requests lost blocks to it. Call it before `take_commands`.

        `chunks` may be a function that reads them from vLLM's output.
        """
        for request_id in preempted:
            seats = self._seats.get(request_id)
            # A request that is read while it is computed loses its lease before others write into its blocks.
            if seats is not None and request_id in self._outgoing:
                self._withdraw(request_id, seats, "preempted")
        try:
            scheduled = chunks() if callable(chunks) else chunks
            with self.guard.around("step"):
                self.turns.step_began(sum(chunk.num_tokens for chunk in scheduled.values()))
            if self._outgoing:
                self._commands.written = self._outgoing.advance(scheduled, self._ranks, self._handoff)
        except Exception as error:
            self.guard.caught("step", "", error)
            if self._outgoing:
                self._outgoing.stop_all(self._ranks[0], error)

    def held(self, holders: Mapping[str, int]) -> None:
        """Handles how many workers took the leases of requests that are read while they are computed."""
        self._outgoing.held(holders, self._ranks, self._handoff)

    def received(self, request_ids: Iterable[str], failed: Container[str]) -> None:
        """Handles loads that ended on every worker, well or not."""
        ended, lookups = tuple(request_ids), self.turns.lookups
        self.incoming.received(ended, failed)
        if lookups is not None:
            for request_id in ended:
                lookups.loaded(request_id, well=request_id not in failed)

    def sent(self, request_ids: Iterable[str]) -> None:
        """Frees the slots of leases that ended on every worker."""
        for request_id in request_ids:
            seats = self._seats.pop(request_id, None)
            if seats is not None:
                self._slots.release(seats)
            with self.guard.around("sent", request_id):
                self._traces.forget(request_id)
            with self.guard.around("sent", request_id):
                self._sent.ended(request_id)

    def finished(
        self, request: Any, block_ids: GroupIds, complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the request's blocks stay until `sent`, and its reader's parameters; `complete`: no abort."""
        request_id = request.request_id
        try:
            self.incoming.ended(request, self._commands)
        except Exception as error:
            self.guard.caught("end", request_id, error)
            self.incoming.abandon(request_id, self._commands)
        try:
            return self._finished(request, block_ids, complete)
        except Exception as error:
            self._commands.handed_off.pop(request_id, None)
            self._sent.ended(request_id)
            self._abandon("hand_off", request, error)
            return False, None
        finally:
            self._stateful.forget(request_id)

    def _finished(
        self, request: Any, block_ids: GroupIds, complete: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        seats, selected = self._seats.get(request_id), self._select(block_ids)
        complete = complete and getattr(request, "arrival_time", self._changed_at) >= self._changed_at
        if seats is None:
            return False, self.turns.ended(
                request, selected, self._engine_id, self._ranks, self._commands, complete=complete
            )
        held = self._stateful.holding(selected)
        if not complete or not any(held):
            self._withdraw(request_id, seats, "aborted")
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        pool_ids = tuple(map(expanded, held, self._ranks[0].kernel_blocks))
        if not self._holds_windows(request, pool_ids, num_tokens) or not self._holds_states(request):
            self._withdraw(request_id, seats, "its sliding window or state has moved on past the prompt")
            return False, None
        handoff = self._handoff(request, seats, pool_ids, num_tokens, self._digest(request, num_tokens))
        answer = {
            **{name: value for name, value in (request.kv_transfer_params or {}).items() if name != KEY},
            **handoff.to_answer(self._engine_id),
        }
        with self.guard.around("share", request_id):
            self.turns.share(request, selected, self._ranks, self._commands)
        announced = self._outgoing.finish(request_id, self._ranks[0], handoff)
        answer |= {ANNOUNCED: announced} if announced else self._outgoing.advice(request)
        num_blocks = sum(block != 0 for group in pool_ids for block in group)
        self._commands.handed_off[request_id] = HandedOff(num_blocks, self._lease_s)
        self._commands.retired += self._sent.add(request_id, handoff.prompt)
        return True, answer

    def _holds_windows(self, request: Any, block_ids: Sequence[array[int]], num_tokens: int) -> bool:
        """Returns whether every token that decode reads still has a block.

        vLLM reuses the blocks that a window has left behind. After more than one token, some are of the prompt.
        """
        prompt = self._stateful.prompt_of(request)
        gap = first_gap(self._windows, block_ids, self._ranks[0].block_tokens, prompt, num_tokens)
        if gap is None:
            return True
        self.counts["window_passed"] += 1
        answered = request.num_computed_tokens + 1 - prompt
        _log.warning(
            "request %s is not handed off: the sliding window has left token %d of its %d prompt tokens behind, which "
            "decode needs%s",
            printable(request.request_id),
            gap,
            prompt,
            f"; it answered {answered} tokens, so let the router ask prefill for max_tokens=1"
            * (answered > 1),
        )
        return False

    def _holds_states(self, request: Any) -> bool:
        """Returns whether the states are those after the prompt, which they are until the next token is computed."""
        if not self._stateful.moved_on(request):
            return True
        self.counts["state_passed"] += 1
        _log.warning(
            "request %s is not handed off: its state is that of %d tokens and not of its prompt; let the router ask "
            "prefill for max_tokens=1",
            printable(request.request_id),
            request.num_computed_tokens,
        )
        return False

    def take_commands(self, *, idle: bool = False) -> StepCommands:
        """Returns the commands for the workers in this step. `idle` says that it computes nothing."""
        with self.guard.around("follow"):
            self.incoming.forward_parts(self._commands)
        self.turns.forward(self._ranks, self._commands)  # without it readers would take wrong bytes for valid
        with self.guard.around("share"):
            self.turns.withdraw_ended()
        commands, self._commands = self._commands, StepCommands()
        commands.idle = idle
        commands.model = self._ranks[0].model if self._ranks else 0
        self.incoming.stepped(idle=idle)
        return commands

    def reset(self) -> bool:
        """Ends the leases of all requests that were handed off, with the next step, and releases others' handoffs.

        Returns False if there were some; their blocks become free once the workers have reported the end.
        """
        self.incoming.reset()
        self._commands.retired += self._sent.all()
        self.turns.reset()
        return not len(self._sent)

    def take_counts(self) -> dict[str, int]:
        """Returns and resets the counts of handoffs that were not used, by reason."""
        counts = dict(self.counts)
        self.counts.clear()
        return counts

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        with self.guard.around("close"):
            self.incoming.close()
        with self.guard.around("close"):
            self.turns.close()
        with self.guard.around("close"):
            if self._announcements is not None:
                self._announcements.close()

    def _grant(self, request: Any, block_ids: GroupIds) -> None:
        request_id = request.request_id
        if not self._stateful.can_hand_off(request_id):
            return  # its prompt is one token, which decode computes itself
        before = self._seats.get(request_id)
        if before is not None:  # preempted and scheduled again, maybe before `scheduled` reports it
            if request_id not in self._outgoing:
                return
            self._withdraw(request_id, before, "preempted")
        reason = "embeddings" if has_embeddings(request) else "" if self._ranks else "no_workers"
        seats = None if reason else self._slots.take()
        if seats is None:
            reason = reason or "no_lease_slot"
            self.counts[reason] += 1
            why = _NOT_HANDED_OFF[reason]
            _log.warning("request %s is not handed off: %s", printable(request_id), why)
            return
        self._seats[request_id] = seats
        self._commands.granted[request_id] = seats
        if not request.num_preemptions:  # a reader that followed it before a preemption cannot do so again
            self._outgoing.begin(
                request,
                seats,
                block_ids,
                self._ranks[0],
                lambda: self._digest(request, request.num_prompt_tokens),
            )

    def _withdraw(self, request_id: str, seats: tuple[LeaseSeat, ...], why: str) -> None:
        """Ends the lease of a request with this step, and takes back its slots. Raises nothing."""
        del self._seats[request_id]
        if self._commands.granted.pop(request_id, None) is None:
            self._commands.withdrawn.append(request_id)
        self._slots.release(seats)
        with self.guard.around("withdraw", request_id):
            self._traces.forget(request_id)
        with self.guard.around("withdraw", request_id):
            self._outgoing.cancel(request_id, self._ranks[0], why)

    def _abandon(self, kind: str, request: Any, error: Exception) -> None:
        """Undoes what was reserved for a request because of an exception: it is computed here, and not handed off."""
        request_id = request.request_id
        self.guard.caught(kind, request_id, error)
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False
        self.incoming.abandon(request_id, self._commands)
        with self.guard.around("undo", request_id):
            self.turns.abandon(request_id)
        seats = self._seats.get(request_id)
        if seats is not None:
            self._withdraw(request_id, seats, "it cannot be handed off any more")

    def _handoff(
        self,
        request: Any,
        seats: tuple[LeaseSeat, ...],
        block_ids: tuple[array[int], ...],
        num_tokens: int,
        prompt: str,
    ) -> Handoff:
        return Handoff(
            request_id=name_of(request.request_id),
            owners=tuple(rank.owner for rank in self._ranks),
            seats=seats,
            block_ids=block_ids,
            block_tokens=self._ranks[0].block_tokens,
            num_tokens=num_tokens,
            prompt=prompt,
            ttl_s=self._lease_s,
            trace=self._traces.of(request, self._ranks[0].owner.worker_id),
            model=self._ranks[0].model,
        )

    def _digest(self, request: Any, num_tokens: int) -> str:
        return prompt_digest(request.prompt_token_ids[:num_tokens], features_of(request, num_tokens))


def _failed_load(request: Any, num_external: int) -> Load:
    """Returns a load that fails at once, for a request that nothing can be loaded for although vLLM waits for it."""
    return Load(request.request_id, None, (), 0, num_external, "its load could not be started")
