# SPDX-License-Identifier: Apache-2.0
"""Follows which blocks of vLLM's prefix cache get new content, by watching its block pool.

Every block that gets new content comes from `BlockPool.get_new_blocks`: those of a step's requests, those that a load
of this or of another connector writes, copies, and blocks for drafts. So the pool itself is watched, and not the
requests of a step, of which a connector beside another one does not see all.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any


class CachedBlocks:
    """The block pool of a server, and those of its blocks that are offered. Used on the scheduler's thread only."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._offered: set[int] = set()
        self._given_away: list[int] = []
        self._blocks_of: dict[str, tuple[int, ...]] = {}
        self._names_at: dict[int, set[str]] = {}
        self._ended: list[str] = []
        self._get_new_blocks, self._evict, self._reset = (
            pool.get_new_blocks,
            pool.evict_blocks,
            pool.reset_prefix_cache,
        )
        pool.get_new_blocks, pool.evict_blocks = self._got_new_blocks, self._evicted
        pool.reset_prefix_cache = self._was_reset

    def __len__(self) -> int:
        """The number of offered blocks."""
        return len(self._offered)

    @property
    def pending(self) -> bool:
        """Whether the next `take` returns blocks."""
        return bool(self._given_away)

    def num_cached(self, block_ids: Sequence[int]) -> int:
        """Returns how many of the first blocks are full, computed, and in the prefix cache."""
        for index, block_id in enumerate(block_ids):
            block = self._pool.blocks[block_id]
            if block.is_null or block.block_hash is None:
                return index
        return len(block_ids)

    def offer(self, block_ids: Sequence[int], name: str = "") -> None:
        """Watches these blocks, which are still in use by their request. `take_ended` names the first one that goes."""
        self._offered.update(block_ids)
        if name:
            self._blocks_of[name] = tuple(block_ids)
            for block_id in block_ids:
                self._names_at.setdefault(block_id, set()).add(name)

    def forget(self, name: str) -> None:
        """Stops to watch for a name. Does nothing if it is not known."""
        for block_id in self._blocks_of.pop(name, ()):
            names = self._names_at[block_id]
            names.discard(name)
            if not names:
                del self._names_at[block_id]

    def take_ended(self) -> list[str]:
        """Returns the names of offers that lost a block since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def withdraw_all(self) -> None:
        """Lets the next `take` return all offered blocks."""
        self._given_away += self._offered
        self._offered.clear()
        self._ended += self._blocks_of
        self._blocks_of.clear()
        self._names_at.clear()

    def take(self) -> array[int]:
        """Returns the offered blocks that get new content in the step that was just scheduled, or later."""
        given_away, self._given_away = self._given_away, []
        return array("I", given_away)

    def _give_away(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if block_id in self._offered:
                self._offered.discard(block_id)
                self._given_away.append(block_id)
                for name in list(self._names_at.get(block_id, ())):
                    self._ended.append(name)
                    self.forget(name)

    # The following methods stand in for the pool's.

    def _got_new_blocks(self, num_blocks: int) -> Any:
        blocks = self._get_new_blocks(num_blocks)
        if self._offered:
            self._give_away(block.block_id for block in blocks)
        return blocks

    def _evicted(self, block_ids: set[int]) -> Any:
        """A load left these blocks with other content than their hashes say."""
        self._give_away(block_ids)
        return self._evict(block_ids)

    def _was_reset(self) -> Any:
        """The weights may have changed. Nothing is offered to the next turns that was computed with the old ones."""
        done = self._reset()
        if done:
            self.withdraw_all()
        return done
