# SPDX-License-Identifier: Apache-2.0
"""The connector in the engine's process: decides who hands over, who loads, and what the workers are told.

Called between steps; nothing here waits or does I/O. Requests and blocks are vLLM's own, used by their attributes.
"""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError
from kvlink.layout import num_seats
from kvlink.ticket import LeaseSeat

from .caches import Rank
from .handover import KEY, Greeting, Handover, expanded, prompt_digest
from .orders import Load, Orders
from .remote_leases import RemoteLeases
from .slots import SlotGroups

_log = logging.getLogger("vllm.kvlink")

GroupIds = tuple[list[int], ...]


@dataclass(slots=True)
class _Incoming:
    """A request that asks for a remote prefill. Without a hand-over `refused` says why."""

    handover: Handover | None
    refused: str = ""


class Scheduling:
    """Both roles in one: a request says which side of a hand-over it is on.

    slots: lease slots of every worker. select: picks the groups that are transferred out of vLLM's block ids.
    own: any of this server's ranks. may_send: False for a kv_consumer.
    """

    def __init__(
        self,
        engine_id: str,
        slots: SlotGroups,
        select: Callable[[Sequence[list[int]]], GroupIds],
        lease_s: float,
        own: Rank,
        may_send: bool = True,
    ) -> None:
        self._engine_id = engine_id
        self._slots = slots
        self._select = select
        self._lease_s = lease_s
        self._may_send = may_send
        self._own = own
        self._ranks: tuple[Greeting, ...] = ()
        self._seats: dict[str, tuple[LeaseSeat, ...]] = {}
        self._incoming: dict[str, _Incoming] = {}
        self._orders = Orders()
        self._remote = RemoteLeases()
        self.counts: Counter[str] = Counter()
        """refused_prompts, malformed, not_offered, released: since the start."""

    def set_ranks(self, ranks: Iterable[Greeting]) -> None:
        """The workers of this server, by tensor-parallel rank."""
        self._ranks = tuple(ranks)

    # Decode.

    def on_new_request(self, request: Any) -> None:
        """A request arrived, and may wait for long before it is scheduled."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        if not params.get(KEY):
            _log.warning(
                "request %s: its prefill server handed over nothing; computing it here", request.request_id
            )
            params["do_remote_prefill"] = False
            self.counts["not_offered"] += 1
            return
        incoming = self._incoming[request.request_id] = self._examine(request, params)
        if incoming.handover is not None and not incoming.refused:
            self._remote.watch(request.request_id, incoming.handover)

    def num_matched(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """Tokens to load beyond those computed, and whether in the background. Free of side effects."""
        incoming = self._incoming.get(request.request_id)
        if incoming is None or not request.kv_transfer_params.get("do_remote_prefill"):
            return 0, False
        count = max(self._num_tokens(request, incoming) - num_computed, 0)
        return count, count > 0

    def allocated(self, request: Any, blocks: GroupIds, num_external: int) -> None:
        """Blocks exist now; `num_external` tokens of them are ours to load."""
        params = request.kv_transfer_params
        if not params:
            return
        if params.get("do_remote_decode") and self._may_send:
            self._grant(request.request_id)
        incoming = self._incoming.get(request.request_id)
        if incoming is None or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once: what follows a failure is computed here
        if num_external == 0:
            self._release(request.request_id)
            return
        groups = tuple(array("I", group) for group in self._select(blocks))
        end = self._num_tokens(request, incoming)
        load = Load(request.request_id, incoming.handover, groups, end - num_external, end, incoming.refused)
        self._orders.loads.append(load)

    def received(self, request_ids: Iterable[str], failed: Container[str]) -> None:
        """Loads that ended, well or not. Ranks that none of ours read from wait for nothing."""
        for request_id in request_ids:
            self._remote.forget(request_id)
            incoming = self._incoming.pop(request_id, None)
            if incoming is None or incoming.handover is None or incoming.refused:
                continue
            ranks = range(len(incoming.handover.owners))
            unread = ranks if request_id in failed else self._unread(ranks)
            self._remote.release(incoming.handover, unread)

    # Prefill.

    def sent(self, request_ids: Iterable[str]) -> None:
        """Leases that ended on every worker: their slots are free."""
        for request_id in request_ids:
            seats = self._seats.pop(request_id, None)
            if seats is not None:
                self._slots.give_back(seats)

    def finished(self, request: Any, blocks: GroupIds, complete: bool) -> tuple[bool, dict[str, Any] | None]:
        """Whether the request's blocks stay until `sent`, and what its reader is told. `complete`: not aborted."""
        request_id = request.request_id
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self._release(request_id)  # ended before it was scheduled
        self._remote.forget(request_id)
        seats = self._seats.get(request_id)
        if seats is None:
            return False, None
        groups = self._select(blocks)
        if not complete or not any(groups) or request.prompt_token_ids is None:
            self._withdraw(request_id, seats)
            return False, None
        self._orders.handed_over[request_id] = self._lease_s
        handover = self._handover(request, seats, groups)
        return True, {
            **{name: value for name, value in params.items() if name != KEY},
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request_id,
            "remote_host": handover.owners[0].agent.rpartition(":")[0],
            "remote_port": int(handover.owners[0].agent.rpartition(":")[2]),
            "tp_size": len(handover.owners),
            "remote_num_tokens": handover.num_tokens,
            KEY: handover.to_params(),
        }

    # Both.

    def take_orders(self, *, idle: bool = False) -> Orders:
        """What the workers are told in this step. `idle`: it computes nothing."""
        orders, self._orders = self._orders, Orders()
        orders.idle = idle
        return orders

    def close(self) -> None:
        """Idempotent."""
        self._remote.close()

    def _examine(self, request: Any, params: Mapping[str, Any]) -> _Incoming:
        try:
            handover = Handover.from_params(params)
        except ConfigError as error:
            self.counts["malformed"] += 1
            return _Incoming(None, str(error))
        if request.prompt_token_ids is None or self._digest(request, handover.num_tokens) != handover.prompt:
            self.counts["refused_prompts"] += 1
            return _Incoming(
                handover, "the hand-over is of another prompt; the router may have mixed up two requests"
            )
        return _Incoming(handover)

    def _num_tokens(self, request: Any, incoming: _Incoming) -> int:
        if incoming.handover is None or incoming.refused:
            return int(request.num_prompt_tokens)
        return min(int(request.num_prompt_tokens), incoming.handover.num_tokens)

    def _unread(self, ranks: range) -> list[int]:
        """Those of an owner that none of ours reads from: they hold what another one holds, too."""
        return [
            r for r in ranks if num_seats(Rank(r, len(ranks), self._own.total_heads), self._own.tp_size) == 0
        ]

    def _release(self, request_id: str) -> None:
        """Unless the hand-over is of another request: that one may still be read."""
        incoming = self._incoming.pop(request_id, None)
        self._remote.forget(request_id)
        if incoming is not None and incoming.handover is not None and not incoming.refused:
            self.counts["released"] += 1
            self._remote.release(incoming.handover, range(len(incoming.handover.owners)))

    def _grant(self, request_id: str) -> None:
        if request_id in self._seats:  # preempted and scheduled again
            return
        seats = self._slots.take()
        if seats is None:
            _log.warning(
                "request %s is not handed over: every lease slot is taken (KVLINK_LEASE_SLOTS)", request_id
            )
            return
        self._seats[request_id] = seats
        self._orders.granted[request_id] = seats

    def _withdraw(self, request_id: str, seats: tuple[LeaseSeat, ...]) -> None:
        del self._seats[request_id]
        self._slots.give_back(seats)
        if self._orders.granted.pop(request_id, None) is None:
            self._orders.withdrawn.append(request_id)

    def _handover(self, request: Any, seats: tuple[LeaseSeat, ...], groups: GroupIds) -> Handover:
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        ratio = self._ranks[0].kernel_blocks
        return Handover(
            request_id=request.request_id,
            owners=tuple(rank.owner for rank in self._ranks),
            seats=seats,
            groups=tuple(expanded(group, ratio) for group in groups),
            block_tokens=self._ranks[0].block_tokens,
            num_tokens=num_tokens,
            prompt=self._digest(request, num_tokens),
            ttl_s=self._lease_s,
        )

    def _digest(self, request: Any, num_tokens: int) -> str:
        features = [str(feature.identifier) for feature in request.mm_features or ()]
        if request.lora_request is not None:
            features.append(str(request.lora_request.lora_name))
        return prompt_digest(request.prompt_token_ids[:num_tokens], features)
