# SPDX-License-Identifier: Apache-2.0
"""Computes which of a request's tokens a group of layers still reads: all of them, or those in a window."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Sliding or chunked attention. vLLM frees the blocks that are wholly before the window of the next token."""

    tokens: int
    """The number of tokens that the next token reads, itself included. For chunked attention, the size of a chunk."""
    block_tokens: int
    """The tokens in a block of the scheduler."""
    chunked: bool = False
    """True if the next token reads only its own chunk."""

    def first(self, num_computed: int) -> int:
        """Returns the first token that is read when `num_computed` tokens are computed and the next one is."""
        if self.chunked:
            return num_computed // self.tokens * self.tokens
        return max(num_computed - self.tokens + 1, 0)

    def kept_from(self, num_computed: int) -> int:
        """Returns the first token whose block vLLM keeps when `num_computed` tokens are computed."""
        return self.first(num_computed) // self.block_tokens * self.block_tokens


Windows = Sequence[Window | None]
"""The windows by cache group; None for layers that read every token. Empty if not known."""


def needed_from(windows: Windows, prompt: int, num_loaded: int) -> tuple[int, ...]:
    """Returns, by group, the first token that the step after a load reads. It always computes the last token."""
    position = min(num_loaded, prompt - 1)
    return tuple(0 if window is None else window.first(position) for window in windows)


def loadable(windows: Windows, prompt: int, num_tokens: int) -> int:
    """Returns how many of `num_tokens` to load.

    vLLM frees blocks as if the token after the load came next, and then computes the prompt's last token. If that token
    still reads the last freed block, loading one token less keeps the block.
    """
    if num_tokens < prompt:
        return num_tokens
    cut = any(window and window.kept_from(prompt) > window.first(prompt - 1) for window in windows)
    return prompt - 1 if cut else prompt


def gap_in(blocks: array[int], block_tokens: int, first: int, end: int) -> int | None:
    """Returns the first token of [first, end) without a block, or None if all have one. 0 in `blocks` is no block."""
    for index in range(first // block_tokens, -(-end // block_tokens)) if first < end else ():
        if index >= len(blocks) or not blocks[index]:
            return max(index * block_tokens, first)
    return None


def first_gap(
    windows: Windows, groups: Sequence[array[int]], block_tokens: Sequence[int], prompt: int, num_tokens: int
) -> int | None:
    """Returns a token that decode reads after a handoff of `num_tokens` and that has no block, or None."""
    needed = needed_from(windows, prompt, num_tokens)
    gaps = (
        gap_in(blocks, size, first, num_tokens)
        for blocks, size, first in zip(groups, block_tokens, needed, strict=False)
        if size
    )
    return next((gap for gap in gaps if gap is not None), None)
