# SPDX-License-Identifier: Apache-2.0
"""Follows which blocks of vLLM's prefix cache get new content, by watching its block pool.

Every block that gets new content comes from `BlockPool.get_new_blocks`: those of a step's requests, those that a load
of this or of another connector writes, copies, and blocks for drafts. So the pool itself is watched, and not the
requests of a step, of which a connector beside another one does not see all.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from kvlink.errors import ConfigError

_WATCHED = frozenset({"get_new_blocks", "evict_blocks", "reset_prefix_cache"})
_KEEP_CONTENT = frozenset({"cache_full_blocks", "cache_partial_block", "move_block_hashes"})
"""Methods that give blocks other hashes. In caches of full attention, no step writes a full block after them."""


def check_pool(pool_class: type) -> None:
    """Raises ConfigError if a pool has a method that makes blocks forget their hashes and that is not known here.

    A block that gets new content forgets its hash. If a later vLLM did so in another method, offers would not end.
    """
    functions = _functions_of(pool_class)
    forgets = {name for name, body in functions.items() if _forgets(body)}
    while more := {
        name for name, body in functions.items() if name not in forgets and _called(body) & forgets - _WATCHED
    }:
        forgets |= more
    unknown = sorted(name for name in forgets - _WATCHED - _KEEP_CONTENT if not name.startswith("_"))
    if unknown:
        raise ConfigError(
            f"KVLinkConnector cannot offer this vLLM's cached blocks: BlockPool.{unknown[0]} makes blocks forget their "
            "content, and kvlink does not know this method; turn bidirectional and share_prefixes off, or use vLLM 0.32"
        )


def _functions_of(pool_class: type) -> dict[str, ast.AST]:
    """Returns the methods of a class and of those that it extends, except constructors. Raises ConfigError."""
    functions: dict[str, ast.AST] = {}
    for one in pool_class.__mro__[:-1]:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError) as error:
            raise ConfigError(
                f"KVLinkConnector cannot offer cached blocks: it cannot read how vLLM's {one.__name__} gives them away "
                f"({error}); turn bidirectional and share_prefixes off"
            ) from None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                functions.setdefault(node.name, node)
    return functions


def _forgets(body: ast.AST) -> bool:
    return "reset_hash" in _called(body) or any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and any(isinstance(target, ast.Attribute) and "block_hash" in target.attr for target in node.targets)
        for node in ast.walk(body)
    )


def _called(body: ast.AST) -> set[str]:
    calls = (node.func for node in ast.walk(body) if isinstance(node, ast.Call))
    return {call.attr for call in calls if isinstance(call, ast.Attribute)}


class CachedBlocks:
    """The block pool of a server, and those of its blocks that are offered. Used on the scheduler's thread only.

    Raises ConfigError as `check_pool` does.
    """

    def __init__(self, pool: Any) -> None:
        check_pool(type(pool))
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
