# SPDX-License-Identifier: Apache-2.0
"""Converts the block ids and token ranges of pools with several cache groups, which have one of each for each group."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any, cast

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout
from kvlink.ticket import Ticket
from kvlink.transfer.block_ids import BlockIds, as_array, as_buffer

GroupIds = BlockIds | Sequence[BlockIds]
"""The block ids of a request: one list, or one for each cache group."""

NumTokens = int | Sequence[int]
"""The tokens of a request: one number, or one for each cache group, if some keep only the last tokens."""

TokenRange = tuple[int, int]
TokenRanges = TokenRange | Sequence[TokenRange]
"""A half-open range of the request's tokens, or one for each cache group.

The range of one group counts what that group keeps: its own tokens from 0 on, or its states.
"""


def reader_of_ids(groups: Sequence[KVLayout]) -> Callable[[Any], Any]:
    """Returns the function that converts the `into` of a pull: to a buffer, or to a copy for each group."""
    if len(groups) == 1:
        return partial(as_buffer, what="into")
    return partial(_arrays, num_groups=len(groups), what="into")


def copied(into: Any) -> Any:
    """Copies the converted `into` of a pull, which the caller may change."""
    return into if type(into) is tuple else as_array(into, "into")


def arrays_of(given: Any, groups: Sequence[KVLayout], what: str) -> list[array[int]]:
    """Returns a copy of the block ids of each group. Raises ConfigError as `as_array` does."""
    if len(groups) == 1:
        return [as_array(given, what)]
    lists = _lists(given, len(groups), what)
    return [as_array(ids, f"{what}, cache group {index}") for index, ids in enumerate(lists)]


def joined(lists: Sequence[array[int]]) -> array[int]:
    """Returns the block ids of all groups, one after the other, as a Ticket has them."""
    ids = array("I")
    for each in lists:
        ids.extend(each)
    return ids


def is_one_range(tokens: TokenRanges) -> bool:
    """Returns whether `tokens` is one range, and not one for each group."""
    return len(tokens) == 2 and not isinstance(tokens[0], Sequence)


def each_range(tokens: TokenRanges) -> list[TokenRange]:
    """Returns the only range, or that of each group. Raises ConfigError for anything else."""
    try:
        ranges = [cast(TokenRange, tokens)] if is_one_range(tokens) else cast("Sequence[TokenRange]", tokens)
        return [(index(first), index(end)) for first, end in ranges]
    except (TypeError, ValueError):
        raise ConfigError(
            f"tokens must be a range (first, end), or a list with one for each cache group, not {tokens!r:.80}"
        ) from None


def ranges_of(
    tokens: TokenRanges | None, layouts: Sequence[KVLayout], ticket: Ticket, theirs: Sequence[array[int]]
) -> list[TokenRange]:
    """Returns the range of each group, within what it keeps.

    One range, or none, reads states whole, and so a group that keeps fewer tokens than the request has: which tokens
    these are, only its engine knows. `theirs` are the block ids of the ticket by group. Raises ConfigError for ranges
    beyond the ticket.
    """
    kept = ticket.tokens_of_groups()
    limits = [
        len(ids) if layout.is_state else held for layout, ids, held in zip(layouts, theirs, kept, strict=True)
    ]
    if tokens is None:
        return [(0, limit) for limit in limits]
    ranges = each_range(tokens)
    if is_one_range(tokens):
        one = within(ranges[0], ticket.num_tokens, "tokens", ticket)
        return [
            (0, limit) if layout.is_state or held < ticket.num_tokens else one
            for layout, limit, held in zip(layouts, limits, kept, strict=True)
        ]
    if len(ranges) != len(layouts):
        raise ConfigError(f"tokens has {len(ranges)} ranges, and the pool {len(layouts)} cache groups")
    return [
        within(each, limit, f"tokens of cache group {group}:", ticket)
        for group, (each, limit) in enumerate(zip(ranges, limits, strict=True))
    ]


def within(asked: tuple[int, int], count: int, what: str, ticket: Ticket) -> tuple[int, int]:
    """Returns the same range. Raises ConfigError unless it is within 0 to `count`. It may be empty."""
    if len(asked) != 2 or not 0 <= asked[0] <= asked[1] <= count:
        raise ConfigError(
            f"request {ticket.request_id}: {what} {' to '.join(map(str, asked))} is no range within 0 to {count}"
        )
    return asked[0], asked[1]


def _arrays(given: Any, num_groups: int, what: str) -> tuple[array[int], ...]:
    lists = _lists(given, num_groups, what)
    return tuple(as_array(ids, f"{what}, cache group {index}") for index, ids in enumerate(lists))


def _lists(given: Any, num_groups: int, what: str) -> Sequence[Any]:
    if not isinstance(given, (list, tuple)) or len(given) != num_groups:
        raise ConfigError(
            f"{what}: pass a list with the block ids of each of the pool's {num_groups} cache groups, not "
            f"{f'{len(given)} of them' if isinstance(given, (list, tuple)) else type(given).__name__}"
        )
    return given
