# SPDX-License-Identifier: Apache-2.0
"""Implements soft offers: blocks that readers may read until their owner gives one of them new content."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import cast

from kvlink.errors import ConfigError
from kvlink.layout import rank_of
from kvlink.ticket import LeaseSeat, Ticket, check_request_id
from kvlink.ticket.prefix_digests import PrefixDigests
from kvlink.transfer.block_ids import BlockIds, as_buffer
from kvlink.transfer.engine import Engine
from kvlink.transfer.group_ids import GroupIds, NumTokens, arrays_of, joined
from kvlink.transfer.offer_check import checked_soft_offer, parent_span
from kvlink.types import WorkerCard

_MAX_TTL_S = 30 * 86400.0


def offer_soft(
    engine: Engine,
    card: WorkerCard,
    request_id: str,
    block_ids: GroupIds,
    num_tokens: NumTokens | None,
    digests: Sequence[bytes],
    ttl_s: float | None,
    trace: str,
    sign: Callable[[Ticket], Ticket],
) -> Ticket:
    """See `Worker.offer_soft`. If `sign` raises, no lease is left behind."""
    check_request_id(request_id)
    blocks = checked_soft_offer(request_id, block_ids, engine.pool.groups, num_tokens)
    prefixes = PrefixDigests.of(digests).checked(blocks.num_tokens) if digests else None
    parent = parent_span(request_id, trace)
    rank, num_ranks = rank_of(engine.pool.layout)
    seat = LeaseSeat(*engine.core.grant_soft(blocks.ids, blocks.written, _checked_ttl(request_id, ttl_s)))
    try:
        return sign(
            Ticket(
                request_id=request_id,
                worker_id=card.worker_id,
                epoch=card.epoch,
                agent=card.agent,
                seats=(seat,),
                block_ids=blocks.ids,
                num_tokens=blocks.num_tokens,
                ready=blocks.written,
                ready_unit=blocks.unit,
                rank=rank,
                num_ranks=num_ranks,
                ttl_s=ttl_s or 0.0,
                group_sizes=blocks.group_sizes,
                group_tokens=blocks.group_tokens,
                trace=parent,
                digests=prefixes,
            )
        )
    except BaseException:
        engine.core.withdraw_soft(seat.slot, seat.nonce)
        raise


def grant_soft_at(
    engine: Engine,
    seat: LeaseSeat,
    block_ids: GroupIds,
    num_tokens: NumTokens | None,
    ttl_s: float | None,
) -> None:
    """See `Worker.grant_soft_at`."""
    what = f"at slot {seat.slot}"
    blocks = checked_soft_offer(what, block_ids, engine.pool.groups, num_tokens)
    row = (seat.slot, seat.nonce, seat.settle_nonce)
    engine.core.grant_soft_at(row, blocks.ids, blocks.written, _checked_ttl(what, ttl_s))


def revoke(engine: Engine, block_ids: GroupIds) -> int:
    """See `Worker.revoke`."""
    if type(block_ids) is array and block_ids.typecode == "I":
        return engine.core.revoke(block_ids)  # every step calls it
    if isinstance(block_ids, (list, tuple)) and block_ids and _is_list(block_ids[0]):
        return engine.core.revoke(joined(arrays_of(block_ids, engine.pool.groups, "revoke")))
    return engine.core.revoke(as_buffer(cast(BlockIds, block_ids), "revoke"))


def _is_list(given: object) -> bool:
    """Returns whether this is the list of a group, and not an id: a tensor of no dimension is one."""
    return isinstance(given, Iterable) and bool(getattr(given, "ndim", True))


def _checked_ttl(request_id: str, ttl_s: float | None) -> float:
    """Returns the time to live as the core counts it, 0 for no end. Raises ConfigError for one out of bounds."""
    if ttl_s is None:
        return 0.0
    if not 0 < ttl_s <= _MAX_TTL_S:
        raise ConfigError(f"offer {request_id}: ttl_s must be in (0, {_MAX_TTL_S:.0f}] or None, not {ttl_s}")
    return ttl_s
