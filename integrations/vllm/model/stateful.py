# SPDX-License-Identifier: Apache-2.0
"""Implements what prefill does differently for models with states, which cannot be taken back by a token.

Decode always computes the prompt's last token. So prefill computes the prompt without it, and hands off the states that
it has then. Requests are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .prompt_inputs import has_embeddings
from .states import States


class Stateful:
    """The requests of a prefill server whose prompts were shortened. `states` has those of each group, or None."""

    def __init__(self, states: Sequence[States | None]) -> None:
        self._states = states
        self._shortened: set[str] = set()
        self.any = any(states)
        """False for a model without states, for which nothing here does anything."""

    def shorten(self, request: Any) -> None:
        """Removes the last token of the prompt, and asks for one token of answer, as that answer is not used.

        Leaves a prompt of one token, of embeddings, or one that must not read the prefix cache, so that decode would
        load nothing.
        """
        if not self.any or has_embeddings(request) or request.num_prompt_tokens < 2:
            return
        if request.request_id in self._shortened or request.get_skip_reading_prefix_cache():
            return
        prompt, tokens = request.prompt_token_ids, request._all_token_ids  # both, or neither is changed
        del prompt[-1:], tokens[-1:]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1
        self._shortened.add(request.request_id)

    def can_hand_off(self, request_id: str) -> bool:
        """Returns whether decode can continue from this request's states."""
        return not self.any or request_id in self._shortened

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._shortened.discard(request_id)

    def holding(self, groups: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Returns the blocks that are handed off: of a group of states, the last, which holds the request's."""
        if not self.any:
            return groups
        return tuple(
            group if states is None else group[-1:]
            for group, states in zip(groups, self._states, strict=True)
        )

    def moved_on(self, request: Any) -> bool:
        """Returns whether the states are no longer those after the prompt, because more was computed."""
        return self.any and request.num_computed_tokens != request.num_prompt_tokens
