# SPDX-License-Identifier: Apache-2.0
"""Implements prefill's side of handoffs in parts: it announces each chunk's blocks when the chunk is scheduled.

The first chunk's blocks follow once every worker holds the lease, because a reader that checks a slot too early finds
it stale. Pure but for the announcing, which happens in the background. Blocks of sliding windows come last, with the
answer: vLLM reuses those that the window leaves behind while the prompt is still being computed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvlink.ticket import LeaseSeat
from kvlink.tracing import TraceParent

from ...request_guard import RequestGuard
from ..stream_decisions import StreamDecisions
from ..wire.boundary import is_name
from ..wire.handoff import Handoff, RankInfo, expanded
from ..wire.handoff_parts import STREAM, STREAMS_FROM, Part
from ..wire.stream_timing import Remaining
from .announcements import Announcements

GroupIds = tuple[list[int], ...]
Writes: TypeAlias = "Callable[[Any, tuple[LeaseSeat, ...], tuple[array[int], ...], int, str], Handoff]"
"""Makes a request's handoff from its seats, blocks of the pool, the tokens in them, and the whole prompt's digest."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The work of one step for one request."""

    new_blocks: GroupIds
    """New blocks of the transferred groups, after those it had; empty if it needs no more."""
    num_tokens: int
    """The tokens to compute in this step."""


@dataclass(slots=True)
class _Outgoing:
    name: str
    request: Any
    seats: tuple[LeaseSeat, ...]
    blocks: GroupIds
    prompt: str
    num_blocks: int = 0
    """The number of the pool's blocks that are full once all scheduled tokens are computed.

    At the prompt's end it includes the block that is not full.
    """
    end: int = 0
    """The number of tokens that are computed after the last scheduled chunk."""
    chunk_tokens: int = 0
    chunk_began: float = 0.0
    """The length of that chunk, and the time when it was scheduled."""
    token_s: float | None = None
    """The seconds that a token of the last computed chunk took."""
    ends: bool = False
    """True once the prompt's last chunk is scheduled."""
    holders: int = 0
    """The number of workers that hold the lease."""
    complete: bool = False
    """True once the last part is announced."""
    trace: TraceParent | None = None
    """The trace of its offer, once there is one."""
    announced: list[Future[None]] = field(default_factory=list)

    def goes_well(self) -> bool:
        """Returns whether the coordinator took a part, and refused none. The last ones may still be in flight."""
        ended = [each for each in self.announced if each.done()]
        return bool(ended) and not any(each.cancelled() or each.exception() for each in ended)

    def begin_chunk(self, num_tokens: int, end: int, now: float) -> None:
        """Takes the time of the chunk before, which has been computed, and notes the one that is scheduled."""
        self.end_chunk(now)
        self.chunk_tokens, self.chunk_began, self.end = num_tokens, now, end

    def end_chunk(self, now: float) -> None:
        """Takes the time of the chunk."""
        if self.chunk_tokens:
            self.token_s = (now - self.chunk_began) / self.chunk_tokens

    def remaining(self, running_tokens: int) -> Remaining | None:
        """Returns the times left if this many tokens of the last scheduled chunk are not computed yet."""
        if self.token_s is None:
            return None
        left = int(self.request.num_prompt_tokens) - self.end + running_tokens
        return Remaining(max(left, running_tokens) * self.token_s, running_tokens * self.token_s)


class Outgoing:
    """The requests whose blocks are announced while they are computed.

    Prompts shorter than `from_tokens` are not. `grows` says, by group, whether its blocks stay until the prompt's end.
    `decisions` counts prompts that are not announced, by reason. A request that `guard` caught an exception of is not
    announced any more, and is handed off with its answer. `clock` gives seconds.
    """

    def __init__(
        self,
        announcements: Announcements | None,
        from_tokens: int,
        grows: Sequence[bool],
        ttl_s: float,
        decisions: StreamDecisions,
        guard: RequestGuard,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announcements = announcements
        self._from_tokens = from_tokens
        self._grows = tuple(grows)
        self._ttl_s = ttl_s
        self._decisions = decisions
        self._guard = guard
        self._clock = clock
        self._requests: dict[str, _Outgoing] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def begin(
        self,
        request: Any,
        seats: tuple[LeaseSeat, ...],
        blocks: GroupIds,
        own: RankInfo,
        digest: Callable[[], str],
    ) -> None:
        """Starts to announce a request that is scheduled for the first time; its reader may be waiting for it."""
        name = (request.kv_transfer_params or {}).get(STREAM)
        if self._announcements is None or not is_name(name):
            return
        if request.num_prompt_tokens < self._from_tokens:
            self._decisions.count("short")
            return
        if request.prompt_token_ids is None:
            return
        if len({size for size, grows in zip(own.block_tokens, self._grows, strict=True) if grows}) != 1:
            return  # its groups grow by blocks of several sizes, or none grows
        copied = tuple(map(list, blocks))
        self._requests[request.request_id] = _Outgoing(name, request, seats, copied, digest())

    def cancel(self, request_id: str, own: RankInfo, why: str) -> None:
        """Stops announcing a request that was preempted or aborted. Idempotent."""
        out = self._requests.pop(request_id, None)
        if out is not None and not out.complete:
            self._send(out, own, Part.refusal(why))

    def advance(self, chunks: Mapping[str, Chunk], own: Sequence[RankInfo], write: Writes) -> dict[str, int]:
        """Announces what a step computes. Returns what readers may read once it has run: `StepCommands.written`."""
        written = {}
        for request_id in self._requests.keys() & chunks.keys():
            out = self._requests[request_id]
            if out.ends:
                continue
            try:
                self._advance(out, chunks[request_id], own, write)
                written[request_id] = out.num_blocks * self._ready_step(own[0])
            except Exception as error:
                self._stop(request_id, own[0], error)
        return written

    def _advance(self, out: _Outgoing, chunk: Chunk, own: Sequence[RankInfo], write: Writes) -> None:
        for group, more in zip(out.blocks, chunk.new_blocks, strict=False):
            group.extend(more)
        whole = int(out.request.num_prompt_tokens)
        end = min(int(out.request.num_computed_tokens) + chunk.num_tokens, whole)
        out.ends = end == whole
        out.begin_chunk(chunk.num_tokens, end, self._clock())
        # A block that is not full will be written again by the next chunk.
        block_tokens = self._growth(own[0])
        out.num_blocks = -(-end // block_tokens) if out.ends else end // block_tokens
        self._announce(out, own, write, chunk.num_tokens)

    def stop_all(self, own: RankInfo, error: Exception) -> None:
        """Stops announcing every request, because it is not known what the step computes."""
        for request_id in list(self._requests):
            self._stop(request_id, own, error)

    def _stop(self, request_id: str, own: RankInfo, error: Exception) -> None:
        self._guard.caught("announce", request_id, error)
        with self._guard.around("announce", request_id):
            self.cancel(request_id, own, "it cannot be announced any more")

    def held(self, holders: Mapping[str, int], own: Sequence[RankInfo], write: Writes) -> None:
        """Counts that so many more workers hold the leases of these requests."""
        for request_id in self._requests.keys() & holders.keys():
            out = self._requests[request_id]
            out.holders += holders[request_id]
            if out.holders < len(own):
                continue
            try:
                self._all_hold(out, own, write)
            except Exception as error:
                self._stop(request_id, own[0], error)

    def _all_hold(self, out: _Outgoing, own: Sequence[RankInfo], write: Writes) -> None:
        running_tokens = out.chunk_tokens
        if out.token_s is None:  # the first chunk is computed, and no other one scheduled
            out.end_chunk(self._clock())
            running_tokens = 0
        self._announce(out, own, write, running_tokens)

    def finish(self, request_id: str, own: RankInfo, handoff: Handoff) -> str:
        """Announces the rest. Returns the name under which everything was announced, or "" if not everything was."""
        out = self._requests.pop(request_id, None)
        if out is not None and not out.announced:
            self._decisions.count("one_chunk")
        if out is None or not out.goes_well():
            return ""
        if not out.complete:
            out.trace = handoff.trace
            part = Part(handoff, handoff.num_tokens, last=True, written=True, sure=True)
            self._send(out, own, part.to_bytes())
        return out.name

    def advice(self, request: Any) -> dict[str, int]:
        """Returns the fields that tell a router not to ask decode about such a short prompt meanwhile."""
        asked = STREAM in (request.kv_transfer_params or {})
        is_short = request.num_prompt_tokens < self._from_tokens
        return {STREAMS_FROM: self._from_tokens} if asked and is_short else {}

    def _announce(self, out: _Outgoing, own: Sequence[RankInfo], write: Writes, running_tokens: int) -> None:
        if not out.num_blocks or out.holders < len(own):
            return
        whole = int(out.request.num_prompt_tokens)
        blocks = tuple(
            expanded(group, ratio)[: out.num_blocks] if grows else array("I")
            for group, ratio, grows in zip(out.blocks, own[0].kernel_blocks, self._grows, strict=True)
        )
        num_tokens = min(out.num_blocks * self._growth(own[0]), whole)
        handoff = write(out.request, out.seats, blocks, num_tokens, out.prompt)
        out.complete, out.trace = out.ends and all(self._grows), handoff.trace
        remaining = out.remaining(running_tokens)
        part = Part(handoff, whole, out.complete, written=False, sure=out.goes_well(), remaining=remaining)
        self._send(out, own[0], part.to_bytes())

    def _growth(self, own: RankInfo) -> int:
        """Returns the tokens in a block of the groups that grow."""
        return next(size for size, grows in zip(own.block_tokens, self._grows, strict=True) if grows)

    def _ready_step(self, own: RankInfo) -> int:
        """Returns what one written block counts for its readers. Layouts with fewer rows are read once all is ready."""
        if sum(map(len, own.units)) == 1:
            return 1
        growing = [units for units, grows in zip(own.units, self._grows, strict=True) if grows]
        return self._growth(own) // min(unit.tokens for units in growing for unit in units)

    def _send(self, out: _Outgoing, own: RankInfo, part: bytes) -> None:
        assert self._announcements is not None
        name, number = out.name, len(out.announced)
        announced = self._announcements.announce(name, number, own.owner, self._ttl_s, part, out.trace)
        out.announced.append(announced)
