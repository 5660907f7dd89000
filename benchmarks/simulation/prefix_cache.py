# SPDX-License-Identifier: Apache-2.0
"""A prefill worker's prefix cache, as vLLM keeps it: whole blocks, and the end of the oldest prompt goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class PrefixCache:
    """Keeps the last used blocks. A block is a number that stands for its tokens and all before."""

    def __init__(self, num_blocks: int, lag_s: float = 0.0) -> None:
        """`lag_s` is how long others still believe that an evicted block is here."""
        self._most = num_blocks
        self._lag_s = lag_s
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._evicted: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def hit(self, prompt: Sequence[int]) -> int:
        """Returns how many of the first blocks are here."""
        return _leading(prompt, self._blocks)

    def seems_to_hit(self, prompt: Sequence[int], now: float) -> int:
        """Returns how many of the first blocks a directory says are here."""
        while self._evicted and next(iter(self._evicted.values())) + self._lag_s <= now:
            self._evicted.popitem(last=False)
        return _leading(prompt, self._blocks, self._evicted)

    def use(self, prompt: Sequence[int], now: float) -> None:
        """Makes these blocks the last used ones, and adds those that are missing."""
        for block in reversed(prompt):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
            self._evicted.pop(block, None)
        while len(self._blocks) > self._most:
            block, _ = self._blocks.popitem(last=False)
            self._evicted.pop(block, None)
            if self._lag_s:
                self._evicted[block] = now


def _leading(prompt: Sequence[int], *where: Container[int]) -> int:
    """Counts from the end of the prompt by bisection, because a block stands for all before it."""
    low, high = 0, len(prompt)
    while low < high:
        middle = (low + high + 1) // 2
        if any(prompt[middle - 1] in each for each in where):
            low = middle
        else:
            high = middle - 1
    return low
