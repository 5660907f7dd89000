# SPDX-License-Identifier: Apache-2.0
"""Checks the blocks of an offer against the layouts of its pool, and says how much of them is written."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout
from kvlink.tracing import TraceParent
from kvlink.transfer.block_ids import check_distinct
from kvlink.transfer.group_ids import GroupIds, NumTokens, arrays_of, joined
from kvlink.types import ReadyUnit


class OfferedBlocks(NamedTuple):
    """The blocks of an offer, in the form of a Ticket. `written` of them are written, counted in `unit`."""

    ids: array[int]
    group_sizes: tuple[int, ...]
    group_tokens: tuple[int, ...]
    num_tokens: int
    unit: ReadyUnit
    written: int


def parent_span(request_id: str, trace: str) -> TraceParent | None:
    """Returns the span of a `traceparent`, None for "" and for a malformed one. Raises ConfigError for no text."""
    if not isinstance(trace, str):
        raise ConfigError(
            f"offer {request_id}: trace must be the text of a traceparent, not {type(trace).__name__}"
        )
    return TraceParent.parse(trace) if trace else None


def checked_offer(
    request_id: str,
    block_ids: GroupIds,
    groups: Sequence[KVLayout],
    num_tokens: NumTokens | None,
    ready: int | None,
    unit: ReadyUnit,
) -> OfferedBlocks:
    """Returns the blocks of an offer. Raises ConfigError, naming the value, for what the pool cannot have."""
    by_group = arrays_of(block_ids, groups, request_id)
    each = _tokens_of_groups(request_id, by_group, groups, num_tokens)
    for index, (ids, group, held) in enumerate(zip(by_group, groups, each, strict=True)):
        what = request_id if len(groups) == 1 else f"{request_id}, cache group {index}"
        check_distinct(ids, group.num_blocks, what)
        if not group.is_state and not _fit(len(ids), group, held):
            raise ConfigError(
                f"offer {what}: {held} tokens do not fit {len(ids)} blocks of {group.block_tokens} tokens"
            )
    tokens = max(each)
    if not 0 < tokens < 2**32:
        raise ConfigError(f"offer {request_id}: num_tokens must be in 1 to 2^32 - 1, not {tokens}")
    if len(groups) == 1:
        return _offered(request_id, by_group[0], (), (), tokens, ready, unit, groups[0].num_layers)
    if unit is not ReadyUnit.TOKENS and ready is not None:
        raise ConfigError(
            f"offer {request_id}: readers follow several cache groups by tokens only; pass ready_unit=TOKENS"
        )
    sizes, ids = tuple(map(len, by_group)), joined(by_group)
    kept = tuple(tokens if group.is_state else held for group, held in zip(groups, each, strict=True))
    return _offered(request_id, ids, sizes, kept, tokens, ready, ReadyUnit.TOKENS, 0)


def checked_soft_offer(
    request_id: str, block_ids: GroupIds, groups: Sequence[KVLayout], num_tokens: NumTokens | None
) -> OfferedBlocks:
    """Returns the blocks of a soft offer, which are full and written.

    Raises ConfigError as `checked_offer` does, for a block that is not full, and for states, which change in place.
    """
    if any(group.is_state for group in groups):
        raise ConfigError(
            f"offer {request_id}: a pool with states has no soft offers, because each step overwrites its states"
        )
    blocks = checked_offer(request_id, block_ids, groups, num_tokens, None, ReadyUnit.BLOCKS)
    sizes, kept = blocks.group_sizes or (len(blocks.ids),), blocks.group_tokens or (blocks.num_tokens,)
    for size, group, held in zip(sizes, groups, kept, strict=True):
        if group.context.num_before(held) != size * group.block_tokens:
            raise ConfigError(
                f"offer {request_id}: {held} tokens do not fill {size} blocks of {group.block_tokens}, and a soft "
                "offer has full blocks only; leave out the last one"
            )
    return blocks


def _fit(num_blocks: int, group: KVLayout, tokens: int) -> bool:
    """Returns whether this rank's part of the tokens needs that many blocks.

    Ranks that share tokens may have as many blocks as the one with most tokens.
    """
    fewer = group.context.num_fitting((num_blocks - 1) * group.block_tokens)
    return fewer < tokens and group.num_blocks_for(tokens) <= num_blocks


def _tokens_of_groups(
    request_id: str, by_group: Sequence[array[int]], groups: Sequence[KVLayout], num_tokens: NumTokens | None
) -> Sequence[int]:
    """Returns how many tokens the blocks of each group hold. Raises ConfigError for a list of another length."""
    if num_tokens is None:
        num_tokens = _fitting_tokens(request_id, by_group, groups)
    if not isinstance(num_tokens, Sequence):
        return [num_tokens] * len(groups)
    if len(num_tokens) != len(groups):
        raise ConfigError(
            f"offer {request_id}: num_tokens has {len(num_tokens)} numbers, and the pool {len(groups)} cache groups"
        )
    return num_tokens


def _fitting_tokens(request_id: str, by_group: Sequence[array[int]], groups: Sequence[KVLayout]) -> int:
    """Returns how many tokens fit into the blocks of every group. Raises ConfigError if only states are offered."""
    fitting = [
        group.context.num_fitting(len(ids) * group.block_tokens)
        for ids, group in zip(by_group, groups, strict=True)
        if not group.is_state
    ]
    if not fitting:
        raise ConfigError(
            f"offer {request_id}: pass num_tokens, because states do not tell how many there are"
        )
    return min(fitting)


def _offered(
    request_id: str,
    ids: array[int],
    group_sizes: tuple[int, ...],
    group_tokens: tuple[int, ...],
    tokens: int,
    ready: int | None,
    unit: ReadyUnit,
    num_layers: int,
) -> OfferedBlocks:
    units = {ReadyUnit.BLOCKS: len(ids), ReadyUnit.LAYERS: num_layers, ReadyUnit.TOKENS: tokens}[unit]
    written = units if ready is None else ready
    if not 0 <= written <= units:
        raise ConfigError(f"offer {request_id}: ready={ready} must be in 0 to {units} {unit.name.lower()}")
    return OfferedBlocks(ids, group_sizes, group_tokens, tokens, unit, written)
