# SPDX-License-Identifier: Apache-2.0
"""Describes states of a fixed size, as Mamba and gated delta nets keep them, in parts that ranks share evenly.

A layer has one or two states: the last inputs of a convolution, and a recurrent state. The columns of a convolution are
those of several projections, each of which is sharded by itself, so each is a part of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from kvlink.errors import ConfigError

from .prompt_inputs import has_embeddings
from .windows import Windows, loadable

_CONVOLVED = {"MAMBA1": 1, "MAMBA2": 3, "GDN_ATTN": 3}
"""The number of projections in the convolution of each kind: x; x, B, C; Q, K, V. B and C, and Q and K, are alike."""

RING = "RING"
"""The kind of circular buffers."""


@dataclass(frozen=True, slots=True)
class States:
    """The states of the layers of one cache group. Shapes are those of one rank."""

    kind: str
    """The name in vLLM's MambaAttentionBackendEnum, or RING."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    item_bytes: tuple[int, ...]
    """The sizes of their elements."""
    columns_first: bool = False
    """True if a convolution's state has shape [columns, inputs], which is VLLM_SSM_CONV_STATE_LAYOUT=DS."""
    replicated: bool = False
    """True if every rank has all of the states."""

    def num_bytes(self) -> int:
        """Returns the bytes of the states of one layer and one request, which follow each other in a block."""
        return sum(prod(shape) * size for shape, size in zip(self.shapes, self.item_bytes, strict=True))


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a state that ranks share by heads: at each offset, `num_heads` adjoining pieces of `head_bytes`."""

    dtype: str
    num_heads: int
    head_bytes: int
    offsets: tuple[int, ...]
    """In bytes, from the start of a block."""


def parts_of(states: States) -> tuple[StatePart, ...]:
    """Returns the parts of the states of one layer.

    States of a kind that is not known here are parts of one head, which only ranks of the same degree can share.
    Raises ConfigError if the shapes are not those of the kind.
    """
    shapes, items = states.shapes, states.item_bytes
    sizes = [prod(shape) * size for shape, size in zip(shapes, items, strict=True)]
    if states.replicated or states.kind not in _CONVOLVED or len(shapes) != 2 or len(shapes[0]) != 2:
        starts = itertools.accumulate(sizes, initial=0)
        return tuple(
            StatePart(dtype, 1, size, (start,))
            for dtype, size, start in zip(states.dtypes, sizes, starts, strict=False)
        )
    recurrent = StatePart(states.dtypes[1], shapes[1][0], sizes[1] // shapes[1][0], (sizes[0],))
    num_columns, num_inputs = shapes[0] if states.columns_first else reversed(shapes[0])
    parts, first = [], 0
    for width in _widths(states.kind, num_columns, shapes[1]):
        if states.columns_first:
            column = num_inputs * items[0]
            parts.append(StatePart(states.dtypes[0], width, column, (first * column,)))
        else:
            row = num_columns * items[0]
            offsets = tuple(index * row + first * items[0] for index in range(num_inputs))
            parts.append(StatePart(states.dtypes[0], width, items[0], offsets))
        first += width
    return (*parts, recurrent)


def _widths(kind: str, num_columns: int, recurrent: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of columns of each projection, in their order."""
    if _CONVOLVED[kind] == 1:
        return (num_columns,)
    values = recurrent[0] * recurrent[1]
    others, odd = divmod(num_columns - values, 2)
    if others <= 0 or odd:
        raise ConfigError(
            f"{kind}: {num_columns} columns of a convolution are not two of a kind and {values}"
        )
    return (values, others, others) if kind == "MAMBA2" else (others, others, values)


class Stateful:
    """The requests of a prefill server whose prompts were shortened. `states` has those of each group, or None.

    Prompts are shortened by one token for states, and by `back_off` if that is more. Without either, `windows` may ask
    for one token less, too, so that vLLM keeps a block that decode reads.
    """

    def __init__(self, states: Sequence[States | None], back_off: int = 0, windows: Windows = ()) -> None:
        self._states = states
        self._back_off = max(back_off, int(any(states)))
        self._windows = windows
        self._removed: dict[str, int] = {}
        self.any = any(states)
        """False for a model without states, for which only back_off and windows matter here."""

    def shorten(self, request: Any) -> None:
        """Removes the last tokens of the prompt, and asks for one token of answer, as that answer is not used.

        Leaves a prompt of no more tokens, of embeddings, or one that must not read the prefix cache, so that decode
        would load nothing.
        """
        count = self._back_off or self._for_windows(request)
        if not count or has_embeddings(request) or request.num_prompt_tokens <= count:
            return
        if request.request_id in self._removed or request.get_skip_reading_prefix_cache():
            return
        prompt, tokens = request.prompt_token_ids, request._all_token_ids  # both, or neither is changed
        del prompt[-count:], tokens[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1
        self._removed[request.request_id] = count

    def _for_windows(self, request: Any) -> int:
        """Returns 1 if vLLM drops a block that decode reads with the prompt's end, and no client reads the answer."""
        prompt = request.num_prompt_tokens
        return int(loadable(self._windows, prompt, prompt) < prompt and request.max_tokens == 1)

    def prompt_of(self, request: Any) -> int:
        """Returns the number of tokens that its client sent."""
        return int(request.num_prompt_tokens) + self._removed.get(request.request_id, 0)

    def can_hand_off(self, request_id: str) -> bool:
        """Returns whether decode can continue from this request's states."""
        return not self.any or request_id in self._removed

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._removed.pop(request_id, None)

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
