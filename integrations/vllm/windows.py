# SPDX-License-Identifier: Apache-2.0
"""Which of a request's tokens a group of layers still reads: all of them, or those in a window."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding or chunked attention. vLLM gives up the blocks that lie wholly before the window of the next token."""

    tokens: int
    """The next token reads so many, itself included. Chunked: the size of a chunk."""
    block_tokens: int
    """Tokens in a block of the scheduler."""
    chunked: bool = False
    """The next token reads its own chunk only."""

    def first(self, num_computed: int) -> int:
        """The first token that is read when `num_computed` tokens are computed and the next one is."""
        if self.chunked:
            return num_computed // self.tokens * self.tokens
        return max(num_computed - self.tokens + 1, 0)

    def kept_from(self, num_computed: int) -> int:
        """The first token whose block vLLM keeps when `num_computed` tokens are computed."""
        return self.first(num_computed) // self.block_tokens * self.block_tokens


Windows = Sequence[Window | None]
"""By cache group; None for layers that read every token. Empty: not known."""


def needed_from(windows: Windows, prompt: int, num_loaded: int) -> tuple[int, ...]:
    """By group, the first token that the step after a load reads. It computes the prompt's last token in any case."""
    position = min(num_loaded, prompt - 1)
    return tuple(0 if window is None else window.first(position) for window in windows)


def loadable(windows: Windows, prompt: int, num_tokens: int) -> int:
    """How many of `num_tokens` to load.

    vLLM drops blocks as if the token behind the load came next, and then computes the prompt's last token. Where that
    one still reads the last block that was dropped, one token less keeps the block.
    """
    if num_tokens < prompt:
        return num_tokens
    cut = any(window and window.kept_from(prompt) > window.first(prompt - 1) for window in windows)
    return prompt - 1 if cut else prompt


def gap_in(blocks: array[int], block_tokens: int, first: int, end: int) -> int | None:
    """The first token of [first, end) without a block; None: all have one. 0 in `blocks` is no block."""
    for index in range(first // block_tokens, -(-end // block_tokens)):
        if index >= len(blocks) or not blocks[index]:
            return max(index * block_tokens, first)
    return None
