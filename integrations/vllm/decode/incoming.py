# SPDX-License-Identifier: Apache-2.0
"""Implements decode's part of the scheduler's side, for requests that are prefilled elsewhere, finished or not."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvlink.errors import ConfigError
from kvlink.layout import Share, num_seats

from ...request_guard import RequestGuard
from ...request_names import printable
from ..model.caches import Rank
from ..model.prompt_inputs import has_embeddings, is_rejection
from ..model.windows import Windows, loadable, needed_from
from ..prefill.announcements import Announcements, Following
from ..stream_decisions import StreamDecisions
from ..wire.boundary import is_name, mismatch, take_params
from ..wire.handoff import KEY, Handoff, RankInfo
from ..wire.handoff_parts import STREAM, Part
from ..wire.step_commands import Load, StepCommands
from ..wire.traces import trace_of
from .remote_leases import RemoteLeases, SharedLeases

_log = logging.getLogger("vllm.kvlink")

Digest = Callable[[Any, int], str]
"""Returns the digest of a request's first tokens."""


class Incoming:
    """The requests that ask for a remote prefill, from arrival until they are loaded. Nothing here waits.

    `own` is any of this server's ranks, and `layout` its caches, None until the workers have reported. `digest` is
    prefill's digest function. `counts` counts handoffs that were not used, by reason. `windows` are those of the cache
    groups that are transferred. With `stateful`, some groups are states, namely those after the last token that prefill
    computed. `decisions` says when pulls begin.
    `guard` keeps what fails for one request inside it. Without states, a load leaves the last `back_off` tokens of a
    prompt.
    """

    layout: RankInfo | None = None

    def __init__(
        self,
        own: Rank,
        announcements: Announcements | None,
        digest: Digest,
        counts: Counter[str],
        windows: Windows = (),
        stateful: bool = False,
        decisions: StreamDecisions | None = None,
        guard: RequestGuard | None = None,
        back_off: int = 0,
    ) -> None:
        self._own = own
        self._announcements = announcements
        self._digest = digest
        self._counts = counts
        self._windows = windows
        self._stateful = stateful
        self._decisions = decisions or StreamDecisions()
        self._guard = guard or RequestGuard(_log)
        self._back_off = back_off
        self._remote = RemoteLeases()
        self._shared_leases = SharedLeases()
        self._requests: dict[str, AwaitedRequest] = {}
        self._asked = False
        """Whether the engine has asked for a waiting request since the last step."""

    def arrived(self, request: Any) -> None:
        """Registers a request and keeps its lease alive, as it may wait for long before it is scheduled."""
        params = take_params(request)
        if not params.get("do_remote_prefill"):
            return
        name = params.get(STREAM)
        if is_rejection(request):
            self._rejected(request)
        elif params.get(KEY):
            incoming = self._requests[request.request_id] = AwaitedRequest()
            try:
                handoff = Handoff.from_params(params)
            except ConfigError as error:
                self._counts["malformed"] += 1
                incoming.refused = str(error)
            else:
                self._take(request, incoming, handoff, handoff.num_tokens)
        elif self._announcements is not None and is_name(name):
            following = self._announcements.follow(name, trace_of(request))
            self._requests[request.request_id] = AwaitedRequest(following=following, ask_again=True)
        else:
            advice = (
                "; set KVLINK_COORDINATOR on this server to follow a prefill that still runs" if name else ""
            )
            self._compute_here(request, f"its prefill server sent no handoff{advice}")

    def num_matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Returns the tokens to load beyond those computed, and whether in the background. None: not known yet."""
        self._asked = True
        incoming = self._requests.get(request.request_id)
        if incoming is None or not request.kv_transfer_params.get("do_remote_prefill"):
            return 0, False
        if self._remote.has_let_go(request.request_id):
            self._release(request.request_id, "not_renewed")
            return 0, False
        if incoming.is_pending and not self._try_begin(request, incoming):
            return (None, False) if request.request_id in self._requests else (0, False)
        if incoming.handoff is not None and not incoming.refused:
            if self.layout is None:
                return None, False  # the workers report with the first step
            if why := mismatch(incoming.handoff, self.layout, self._own.total_heads):
                self._refuse_layout(request.request_id, incoming, incoming.handoff, why)
        if incoming.handoff is not None and not incoming.refused:
            if self._shared_leases.must_wait(incoming.handoff, request.request_id):
                return None, False
            if self._shared_leases.is_spent(incoming.handoff):
                self._leave_spent(request, incoming.handoff)
                return 0, False
        count = max(self._num_tokens(request, incoming) - num_computed, 0)
        return count, count > 0

    def allocated(
        self, request: Any, into: tuple[array[int], ...], num_external: int, commands: StepCommands
    ) -> None:
        """Starts the load of `num_external` tokens, for which blocks exist now."""
        params = request.kv_transfer_params
        incoming = self._requests.get(request.request_id)
        if incoming is None or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # once: after a failure the prompt is computed here
        if num_external == 0:
            self._release(request.request_id)
            return
        end = self._num_tokens(request, incoming)
        incoming.started = True
        self._remote.loading(request.request_id)
        if incoming.handoff is not None and not incoming.refused:
            incoming.settles = self._shared_leases.settles(incoming.handoff, request.request_id)
        commands.loads.append(
            Load(
                request.request_id,
                incoming.handoff,
                into,
                end - num_external,
                end,
                incoming.refused,
                in_parts=incoming.following is not None and not incoming.refused,
                needed_from=needed_from(self._windows, int(request.num_prompt_tokens), end),
                settles=incoming.settles,
            )
        )

    def forward_parts(self, commands: StepCommands) -> None:
        """Passes on what prefill servers have announced about active loads."""
        for request_id, incoming in self._requests.items():
            if incoming.following is None or not incoming.started:
                continue
            try:
                parts, incoming.parts = incoming.parts + incoming.following.take(), []
            except Exception as error:
                self._guard.caught("follow", request_id, error)
                commands.cut[request_id] = "its parts cannot be followed"
                continue
            if parts:
                incoming.ask_again = not (parts[-1].last and parts[-1].sure)
                commands.parts[request_id] = parts
            if incoming.following.why_ended:
                commands.cut[request_id] = incoming.following.why_ended

    def received(self, request_ids: Iterable[str], failed: Container[str]) -> None:
        """Handles loads that ended, well or not. Ranks that none of ours reads from are released."""
        for request_id in request_ids:
            incoming = self._requests.get(request_id)
            if incoming is not None and incoming.handoff is not None and not incoming.refused:
                with self._guard.around("received", request_id):
                    self._left(request_id, incoming, incoming.handoff, well=request_id not in failed)
            self._forget(request_id)

    def _left(self, request_id: str, incoming: AwaitedRequest, handoff: Handoff, *, well: bool) -> None:
        if well:
            self._shared_leases.has_read(handoff)
        last = self._shared_leases.release_later(handoff, request_id)
        if incoming.ask_again:
            self._leave(request_id, handoff)
        elif incoming.settles and well:
            self._release_handoff(handoff, self._unread(range(len(handoff.owners))), used=True)
        elif last:
            self._release_handoff(handoff, range(len(handoff.owners)), used=True)

    def abandon(self, request_id: str, commands: StepCommands) -> None:
        """Forgets a request in any state, after an exception, and releases its lease. Raises nothing.

        Nobody follows its prefill any more, so a load that waits for parts ends.
        """
        incoming = self._requests.get(request_id)
        if incoming is not None and incoming.started and incoming.following is not None:
            commands.cut[request_id] = "the request was given up"
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        incoming = self._requests.pop(request_id, None)
        with self._guard.around("undo", request_id):
            self._remote.forget(request_id)
        if incoming is None:
            return
        self._stop_following(request_id, incoming)
        handoff = incoming.handoff
        if handoff is not None and self._shared_leases.release_later(handoff, request_id):
            with self._guard.around("undo", request_id):
                self._release_handoff(handoff, range(len(handoff.owners)), used=incoming.started)

    def ended(self, request: Any, commands: StepCommands) -> None:
        """Handles the end of a request in any state."""
        request_id = request.request_id
        self._remote.forget(request_id)
        incoming = self._requests.get(request_id)
        if incoming is None:
            return
        if incoming.started and incoming.following is not None:
            commands.cut[request_id] = "the request has ended"
            self._release(request_id)
        elif not incoming.started:
            self._release(request_id)

    def stepped(self, *, idle: bool) -> None:
        """Notes a step of the engine; `idle`: it computes nothing. Leases are renewed only while steps come."""
        self._remote.stepped(advanced=self._asked or not idle)
        self._asked = False

    def reset(self) -> None:
        """Releases the handoffs of requests without blocks, as other weights may have made them.

        Their prompts are computed here.
        """
        for request_id, incoming in list(self._requests.items()):
            if not incoming.started and not incoming.refused:
                self._release(request_id)

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        for request_id, incoming in self._requests.items():
            self._stop_following(request_id, incoming)
        self._remote.close()

    def _refuse_layout(self, request_id: str, incoming: AwaitedRequest, handoff: Handoff, why: str) -> None:
        """Refuses a handoff that no rank of this server can read, and releases its lease."""
        self._counts["another_layout"] += 1
        incoming.refused = (
            f"the caches of its prefill server ({handoff.owners[0].worker_id}) have another layout: {why}; start both "
            "servers with the same model, cache groups and block size"
        )
        incoming.handoff = None
        self._remote.forget(request_id)
        self._stop_following(request_id, incoming)
        if self._shared_leases.release_later(handoff, request_id):
            if incoming.ask_again:
                self._leave(request_id, handoff)
            else:
                self._release_handoff(handoff, range(len(handoff.owners)), used=False)

    def _rejected(self, request: Any) -> None:
        """Releases the blocks of a request that this server refused, or whose client left before it was admitted."""
        params = request.kv_transfer_params
        params["do_remote_prefill"] = False
        if not params.get(KEY):
            return
        try:
            handoff = Handoff.from_params(params)
        except ConfigError:
            self._counts["malformed"] += 1
            return
        if not self._shared_leases.are_there(handoff) and not self._shared_leases.was_used(handoff):
            self._counts["released"] += 1
            self._release_handoff(handoff, range(len(handoff.owners)), used=False)

    def _try_begin(self, request: Any, incoming: AwaitedRequest) -> bool:
        assert incoming.following is not None
        why_ended = incoming.following.why_ended
        came = incoming.following.take()
        incoming.parts += came
        if came and not why_ended and not self._decisions.begins(request.request_id, came[-1]):
            return False
        if incoming.parts and (came or why_ended):
            first, incoming.parts = incoming.parts[0], incoming.parts[-2:]
            self._take(request, incoming, first.handoff, first.num_tokens)
            return True
        if why_ended:
            self._pop(request.request_id)
            self._compute_here(request, f"its prefill was not announced ({why_ended})")
        return False

    def _take(self, request: Any, incoming: AwaitedRequest, handoff: Handoff, num_tokens: int) -> None:
        incoming.handoff, incoming.num_tokens = handoff, num_tokens
        if handoff.soft:
            self._counts["malformed"] += 1
            incoming.refused = "the handoff is an answer's, which prefill pulls for the next turn"
        elif has_embeddings(request) or self._digest(request, num_tokens) != handoff.prompt:
            self._counts["another_prompt"] += 1
            incoming.refused = (
                "the handoff belongs to another prompt; the router may have mixed up two requests"
            )
        elif self._stateful and num_tokens >= request.num_prompt_tokens:
            incoming.refused = (
                "the handoff has the state after the last token of the prompt, which is computed here"
            )
        else:
            self._shared_leases.join(handoff, request.request_id)
            self._remote.watch(request.request_id, handoff)

    def _compute_here(self, request: Any, why: str) -> None:
        _log.warning("request %s: %s; computing it here", printable(request.request_id), why)
        request.kv_transfer_params["do_remote_prefill"] = False
        self._counts["not_offered"] += 1

    def _num_tokens(self, request: Any, incoming: AwaitedRequest) -> int:
        prompt = int(request.num_prompt_tokens)
        handed_off = prompt if incoming.refused else min(prompt, incoming.num_tokens)
        if prompt > self._back_off and not self._stateful:  # a state is that after all tokens of the handoff
            handed_off = min(handed_off, prompt - self._back_off)
        return loadable(self._windows, prompt, handed_off)

    def _unread(self, ranks: range) -> list[int]:
        """Returns the ranks of an owner that none of ours reads from: they hold the same data as another."""
        return [
            r for r in ranks if num_seats(Share(self._own.total_heads, r, len(ranks)), self._own.tp_size) == 0
        ]

    def _release(self, request_id: str, reason: str = "released") -> None:
        """Releases the lease, unless the handoff belongs to another request, or others are under its lease."""
        incoming = self._pop(request_id)
        if incoming is not None and incoming.is_pending and incoming.parts:
            self._leave(request_id, incoming.parts[-1].handoff)
        if incoming is None or incoming.handoff is None or incoming.refused:
            return
        handoff = incoming.handoff
        read = self._shared_leases.was_read(handoff)
        if not self._shared_leases.release_later(handoff, request_id):
            return
        self._counts[reason] += not read
        if incoming.ask_again:
            self._leave(request_id, handoff)
        else:
            self._release_handoff(handoff, range(len(handoff.owners)), used=read)

    def _release_handoff(self, handoff: Handoff, ranks: Iterable[int], *, used: bool) -> None:
        """Ends a lease under which no other request is."""
        self._shared_leases.spend(handoff, used=used)
        self._remote.release(handoff, ranks)

    def _leave_spent(self, request: Any, handoff: Handoff) -> None:
        self._pop(request.request_id)
        self._shared_leases.release_later(handoff, request.request_id)
        request.kv_transfer_params["do_remote_prefill"] = False
        self._counts["used_already"] += 1
        _log.info(
            "request %s: its handoff (prefill request %s) was already used here; computing it here",
            printable(request.request_id),
            printable(handoff.request_id),
        )

    def _leave(self, request_id: str, handoff: Handoff) -> None:
        others = (one.handoff for name, one in self._requests.items() if name != request_id)
        if not any(other is not None and other.seats == handoff.seats for other in others):
            self._remote.release_later(handoff)

    def _pop(self, request_id: str) -> AwaitedRequest | None:
        self._remote.forget(request_id)
        incoming = self._requests.pop(request_id, None)
        if incoming is not None:
            self._stop_following(request_id, incoming)
        return incoming

    def _stop_following(self, request_id: str, incoming: AwaitedRequest) -> None:
        """Stops reading what prefill announces. If that fails, the lease is released all the same."""
        if incoming.following is not None:
            with self._guard.around("follow", request_id):
                incoming.following.stop()


@dataclass(slots=True)
class AwaitedRequest:
    """A request with its handoff. `handoff` is None while it is awaited, and if `refused` says why there is none."""

    handoff: Handoff | None = None
    num_tokens: int = 0
    """The tokens that prefill computes or has computed."""
    refused: str = ""
    following: Following | None = None
    parts: list[Part] = field(default_factory=list)
    """The parts that the workers do not know yet."""
    started: bool = False
    """True once the workers know of the load."""
    settles: bool = False
    """True if its load ends the lease."""
    ask_again: bool = False
    """True if the router may come again with prefill's answer: the same handoff, under the same lease."""

    @property
    def is_pending(self) -> bool:
        """Whether prefill has not sent a handoff yet."""
        return self.handoff is None and not self.refused
