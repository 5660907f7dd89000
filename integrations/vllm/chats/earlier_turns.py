# SPDX-License-Identifier: Apache-2.0
"""Implements prefill's part of chats with several turns: it pulls the last turn's answer instead of computing it.

The router sends prefill what decode's answer to the last turn carried. Prefill compares the digests of prefixes, and
pulls the shared prefix that it lacks. If a block got other content meanwhile, the load fails, and
the prompt is computed as without a ticket.

A streamed answer carries no ticket. Decode then offers it at the coordinator, under a name that the router chose.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError

from ...request_names import printable
from ..model.prompt_inputs import has_embeddings
from ..prefill.announcements import Announcements
from ..wire.boundary import is_name, mismatch
from ..wire.handoff import KEY, Handoff, RankInfo
from ..wire.step_commands import Load, StepCommands
from .prefix_lookups import PrefixLookups, prefix_digests

_log = logging.getLogger("vllm.kvlink")

ANSWER_AS = "kvlink_answer_as"
"""In `kv_transfer_params` of decode, the name under which it offers its answer at the coordinator."""
ANSWER_OF = "kvlink_answer_of"
"""In those of prefill, the name of the last turn's answer."""
_ASK_S = 0.1
"""The wait for an answer whose end the client knows earlier than the coordinator."""


@dataclass(frozen=True, slots=True)
class _Turn:
    handoff: Handoff
    num_tokens: int
    """The tokens that both requests have in common, without the prompt's last, which is computed here."""


class EarlierTurns:
    """The requests that came with a ticket of their last turn, until they are loaded. `counts` counts by result.

    Without `announcements` there is no coordinator. With `lookups`, the prefixes of others are found by a directory.
    """

    def __init__(
        self,
        counts: Counter[str],
        announcements: Announcements | None = None,
        lookups: PrefixLookups | None = None,
    ) -> None:
        self._counts = counts
        self._lookups = lookups
        self._announcements = announcements
        self._turns: dict[str, _Turn] = {}
        self._asked: dict[str, Future[bytes]] = {}

    def arrived(self, request: Any) -> None:
        """Registers a request before it is scheduled."""
        params = request.kv_transfer_params or {}
        if self._lookups is not None and not params.get("do_remote_prefill") and not params.get(KEY):
            self._lookups.arrived(request)
        if not params.get("do_remote_decode") or has_embeddings(request):
            return
        name = params.get(ANSWER_OF)
        if params.get(KEY):
            self._take(request, params)
        elif self._announcements is not None and is_name(name):
            self._asked[request.request_id] = self._announcements.take(name, _ASK_S)

    def _take(self, request: Any, params: Mapping[str, Any]) -> None:
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

    def num_matched(self, request: Any, num_computed: int, ranks: Sequence[RankInfo] = ()) -> int | None:
        """Returns the number of tokens to pull beyond those computed, 0 without a ticket. None: not known yet."""
        asked = self._asked.get(request.request_id)
        if asked is not None:
            if not asked.done():
                return None
            del self._asked[request.request_id]
            self._learn(request, asked)
        if self._lookups is not None and request.request_id not in self._turns:
            self._lookups.ask(request, num_computed, tuple(ranks))
            if self._lookups.is_asking(request.request_id):
                return None
            handoff = self._lookups.take(request, _common_tokens, num_computed)
            if handoff is not None:
                self._turns[request.request_id] = _Turn(handoff, _common_tokens(request, handoff))
        turn = self._turns.get(request.request_id)
        if turn is None:
            return 0
        if not ranks:
            return None  # the workers report with the first step
        if why := mismatch(turn.handoff, ranks[0]):
            self._refuse(request.request_id, why)
            return 0
        return max(turn.num_tokens - num_computed, 0)

    def begins(
        self, request: Any, into: tuple[array[int], ...], num_external: int, commands: StepCommands
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
            Load(request.request_id, turn.handoff, into, first, turn.num_tokens, settles=False)
        )
        return True

    def ended(self, request_id: str) -> None:
        """Forgets a request in any state."""
        if self._lookups is not None:
            self._lookups.ended(request_id)
        self._turns.pop(request_id, None)
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.cancel()

    def _refuse(self, request_id: str, why: str) -> None:
        del self._turns[request_id]
        if self._lookups is not None:
            self._lookups.loaded(request_id, well=False)
        self._counts["another_layout"] += 1
        _log.warning("request %s: its last turn's answer cannot be pulled: %s", printable(request_id), why)

    def _learn(self, request: Any, asked: Future[bytes]) -> None:
        error = CancelledError() if asked.cancelled() else asked.exception()
        if error is not None:
            self._counts["not_offered"] += 1
            name = printable(request.request_id)
            _log.info("request %s: its last turn's answer is not offered: %s", name, error)
            return
        try:
            params = json.loads(asked.result())
        except (ValueError, RecursionError):
            self._counts["malformed"] += 1
        else:
            self._take(request, params)


def _common_tokens(request: Any, handoff: Handoff) -> int:
    digests = handoff.digests
    if not handoff.soft or digests is None:
        return 0
    span = handoff.num_tokens // len(digests)
    most = min(handoff.num_tokens, int(request.num_prompt_tokens) - 1) // span * span
    return digests.num_common(prefix_digests(request, most, span)) * span if most else 0
