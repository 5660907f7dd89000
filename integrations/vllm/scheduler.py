# SPDX-License-Identifier: Apache-2.0
"""The connector in the engine's process: decides who hands over, who loads, and what the workers are told.

Called between steps; nothing here waits or does I/O. Requests and blocks are vLLM's own, used by their attributes.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from kvlink.ticket import LeaseSeat

from .announcements import Announcements
from .caches import Rank
from .handoff import KEY, Handoff, RankInfo, expanded, prompt_digest
from .incoming import Incoming
from .outgoing import Chunk, GroupIds, Outgoing
from .parts import ANNOUNCED
from .slots import SlotGroups
from .step_commands import HandedOff, StepCommands
from .tickets_out import TicketsOut
from .traces import Traces
from .windows import Windows, gap_in, needed_from

_log = logging.getLogger("vllm.kvlink")


class SchedulerSide:
    """Both roles in one: a request says which side of a handoff it is on.

    slots: lease slots of every worker. select: picks the groups that are transferred out of vLLM's block ids.
    own: any of this server's ranks. may_send: False for a kv_consumer. announcements: None without a coordinator.
    streaming_from: tokens from which on prompts are handed over in parts. grows: see Outgoing. windows: of the groups
    that are transferred.
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
    ) -> None:
        self._engine_id = engine_id
        self._slots = slots
        self._select = select
        self._lease_s = lease_s
        self._may_send = may_send
        self._announcements = announcements
        self._ranks: tuple[RankInfo, ...] = ()
        self._seats: dict[str, tuple[LeaseSeat, ...]] = {}
        self._orders = StepCommands()
        self._traces = Traces()
        self._out = TicketsOut()
        self.counts: Counter[str] = Counter()
        """Handoffs that were not used, by reason, since they were last taken."""
        self._windows = windows
        self._incoming = Incoming(own, announcements, self._digest, self.counts, windows)
        self._outgoing = Outgoing(announcements, streaming_from, grows, lease_s)

    def set_ranks(self, ranks: Iterable[RankInfo]) -> None:
        """The workers of this server, by tensor-parallel rank."""
        self._ranks = tuple(ranks)

    # Decode.

    def on_new_request(self, request: Any) -> None:
        """A request arrived, and may wait for long before it is scheduled."""
        self._incoming.arrived(request)

    def num_matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Tokens to load beyond those computed, and whether in the background. None: ask again."""
        return self._incoming.num_matched(request, num_computed)

    def allocated(self, request: Any, blocks: GroupIds, num_external: int) -> None:
        """Blocks exist now; `num_external` tokens of them are ours to load."""
        params = request.kv_transfer_params
        if not params:
            return
        groups = self._select(blocks)
        if params.get("do_remote_decode") and self._may_send:
            self._grant(request, groups)
        self._incoming.allocated(
            request, tuple(array("I", group) for group in groups), num_external, self._orders
        )

    def received(self, request_ids: Iterable[str], failed: Container[str]) -> None:
        """Loads that ended, well or not."""
        self._incoming.received(request_ids, failed)

    # Prefill.

    def scheduled(self, chunks: Mapping[str, Chunk], preempted: Iterable[str]) -> None:
        """What the step computes, and who lost their blocks to it. Before `take_orders`."""
        for request_id in preempted:
            seats = self._seats.get(request_id)
            # Whoever is read while being computed loses the lease before others write into its blocks.
            if seats is not None and request_id in self._outgoing:
                self._withdraw(request_id, seats, "preempted")
        if self._outgoing:
            self._orders.written = self._outgoing.advance(chunks, self._ranks, self._handoff)

    def held(self, holders: Mapping[str, int]) -> None:
        """How many workers took the leases of requests that are read while they are computed."""
        self._outgoing.held(holders, self._ranks, self._handoff)

    def sent(self, request_ids: Iterable[str]) -> None:
        """Leases that ended on every worker: their slots are free."""
        for request_id in request_ids:
            self._traces.forget(request_id)
            self._out.ended(request_id)
            seats = self._seats.pop(request_id, None)
            if seats is not None:
                self._slots.give_back(seats)

    def finished(self, request: Any, blocks: GroupIds, complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks stay until `sent`, and what its reader is told. `complete`: not aborted."""
        request_id = request.request_id
        params = request.kv_transfer_params or {}
        self._incoming.ended(request, self._orders)
        seats = self._seats.get(request_id)
        if seats is None:
            return False, None
        groups = self._select(blocks)
        if not complete or not any(groups) or request.prompt_token_ids is None:
            self._withdraw(request_id, seats, "aborted")
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        own = tuple(expanded(group, self._ranks[0].kernel_blocks) for group in groups)
        if not self._holds_windows(request, own, num_tokens):
            self._withdraw(request_id, seats, "its sliding window has moved on past the prompt")
            return False, None
        num_blocks = sum(block != 0 for group in own for block in group)
        self._orders.handed_off[request_id] = HandedOff(num_blocks, self._lease_s)
        handoff = self._handoff(request, seats, own, num_tokens, self._digest(request, num_tokens))
        self._orders.retired += self._out.add(request_id, handoff.prompt)
        announced = self._outgoing.finish(request_id, self._ranks[0], handoff)
        return True, {
            **{name: value for name, value in params.items() if name != KEY},
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": handoff.owners[0].agent.rpartition(":")[0],
            "remote_port": int(handoff.owners[0].agent.rpartition(":")[2]),
            "tp_size": len(handoff.owners),
            "remote_num_tokens": handoff.num_tokens,
            KEY: handoff.to_params(),
            **({ANNOUNCED: announced} if announced else {}),
        }

    def _holds_windows(self, request: Any, groups: Sequence[array[int]], num_tokens: int) -> bool:
        """Whether every token that decode reads still has a block. vLLM gives the blocks that a window has left to
        others: those of the prompt, too, after more than one token of the answer."""
        needed = needed_from(self._windows, request.num_prompt_tokens, num_tokens)
        block_tokens = self._ranks[0].block_tokens
        gaps = (
            gap_in(blocks, block_tokens, first, num_tokens)
            for blocks, first in zip(groups, needed, strict=False)
        )
        gap = next((gap for gap in gaps if gap is not None), None)
        if gap is None:
            return True
        self.counts["window_passed"] += 1
        answered = request.num_computed_tokens + 1 - request.num_prompt_tokens
        _log.warning(
            "request %s is not handed over: the sliding window has left token %d of its %d prompt tokens behind, which "
            "decode needs%s",
            request.request_id,
            gap,
            request.num_prompt_tokens,
            f"; it answered {answered} tokens, have the router ask prefill for max_tokens=1" * (answered > 1),
        )
        return False

    # Both.

    def take_orders(self, *, idle: bool = False) -> StepCommands:
        """What the workers are told in this step. `idle`: it computes nothing."""
        self._incoming.tell(self._orders)
        orders, self._orders = self._orders, StepCommands()
        orders.idle = idle
        return orders

    def reset(self) -> bool:
        """Ends the leases of all requests that were handed over, with the next step. False: there were some, and their
        blocks come back once the workers have reported that."""
        self._orders.retired += self._out.all()
        return not len(self._out)

    def take_counts(self) -> dict[str, int]:
        """Handoffs that were not used since the last call, by reason."""
        counts = dict(self.counts)
        self.counts.clear()
        return counts

    def close(self) -> None:
        """Idempotent."""
        self._incoming.close()
        if self._announcements is not None:
            self._announcements.close()

    def _grant(self, request: Any, groups: GroupIds) -> None:
        request_id = request.request_id
        before = self._seats.get(request_id)
        if before is not None:  # preempted and scheduled again, maybe before we are told in `scheduled`
            if request_id not in self._outgoing:
                return
            self._withdraw(request_id, before, "preempted")
        seats = self._slots.take()
        if seats is None:
            _log.warning(
                "request %s is not handed over: every lease slot is taken (KVLINK_LEASE_SLOTS)", request_id
            )
            self.counts["no_lease_slot"] += 1
            return
        self._seats[request_id] = seats
        self._orders.granted[request_id] = seats
        if not request.num_preemptions:  # whom its reader followed before that cannot be followed again
            self._outgoing.begin(
                request, seats, groups, lambda: self._digest(request, request.num_prompt_tokens)
            )

    def _withdraw(self, request_id: str, seats: tuple[LeaseSeat, ...], why: str) -> None:
        del self._seats[request_id]
        self._traces.forget(request_id)
        self._slots.give_back(seats)
        self._outgoing.give_up(request_id, self._ranks[0], why)
        if self._orders.granted.pop(request_id, None) is None:
            self._orders.withdrawn.append(request_id)

    def _handoff(
        self,
        request: Any,
        seats: tuple[LeaseSeat, ...],
        groups: tuple[array[int], ...],
        num_tokens: int,
        prompt: str,
    ) -> Handoff:
        return Handoff(
            request_id=request.request_id,
            owners=tuple(rank.owner for rank in self._ranks),
            seats=seats,
            groups=groups,
            block_tokens=self._ranks[0].block_tokens,
            num_tokens=num_tokens,
            prompt=prompt,
            ttl_s=self._lease_s,
            trace=self._traces.of(request, self._ranks[0].owner.worker_id),
        )

    def _digest(self, request: Any, num_tokens: int) -> str:
        features = [str(feature.identifier) for feature in request.mm_features or ()]
        if request.lora_request is not None:
            features.append(str(request.lora_request.lora_name))
        return prompt_digest(request.prompt_token_ids[:num_tokens], features)
