# SPDX-License-Identifier: Apache-2.0
"""Implements prefill's part of chats with several turns: it pulls the last turn's answer instead of computing it.

The router sends prefill what decode's answer to the last turn carried. Prefill compares the digests of prefixes, and
pulls what both have in common and its own cache has not. If a block got other content meanwhile, the load fails, and
the prompt is computed as without a ticket.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError

from .handoff import KEY, Handoff
from .prefixes import prefix_digests
from .prompt_inputs import has_embeddings
from .step_commands import Load, StepCommands


@dataclass(frozen=True, slots=True)
class _Turn:
    handoff: Handoff
    num_tokens: int
    """The tokens that both requests have in common, without the prompt's last, which is computed here."""


class EarlierTurns:
    """The requests that came with a ticket of their last turn, until they are loaded. `counts` counts by result."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._turns: dict[str, _Turn] = {}

    def arrived(self, request: Any) -> None:
        """Registers a request before it is scheduled."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_decode") or not params.get(KEY) or has_embeddings(request):
            return
        try:
            handoff = Handoff.from_params(params)
        except ConfigError:
            self._counts["malformed"] += 1
            return
        num_tokens = _common_tokens(request, handoff)
        if num_tokens:
            self._turns[request.request_id] = _Turn(handoff, num_tokens)
        else:
            self._counts["nothing_in_common"] += 1

    def num_matched(self, request: Any, num_computed: int) -> int:
        """Returns the number of tokens to pull beyond those computed; 0 for requests without a ticket too."""
        turn = self._turns.get(request.request_id)
        return max(turn.num_tokens - num_computed, 0) if turn is not None else 0

    def begins(
        self, request: Any, groups: tuple[array[int], ...], num_external: int, commands: StepCommands
    ) -> bool:
        """Starts the load of `num_external` tokens, for which blocks exist now. Returns whether there is one."""
        turn = self._turns.pop(request.request_id, None)  # once: after a failure the prompt is computed
        if turn is None:
            return False
        if not num_external:
            self._counts["cached_here"] += 1
            return False
        first = turn.num_tokens - num_external
        commands.loads.append(
            Load(request.request_id, turn.handoff, groups, first, turn.num_tokens, settles=False)
        )
        return True

    def ended(self, request_id: str) -> None:
        """Forgets a request in any state."""
        self._turns.pop(request_id, None)


def _common_tokens(request: Any, handoff: Handoff) -> int:
    digests = handoff.digests
    if not handoff.soft or digests is None:
        return 0
    span = handoff.num_tokens // len(digests)
    most = min(handoff.num_tokens, int(request.num_prompt_tokens) - 1) // span * span
    return digests.num_common(prefix_digests(request, most, span)) * span if most else 0
