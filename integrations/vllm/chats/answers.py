# SPDX-License-Identifier: Apache-2.0
"""Implements decode's part of chats with several turns: it offers what a finished request left in the prefix cache.

The offer is a soft lease. It pins nothing: vLLM frees the blocks at once, and may give each of them to another request.
The step in which it does so ends the lease on every rank before anything writes the block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvlink.ticket.prefix_digests import PrefixDigests

from ...request_names import name_of
from ..model.prompt_inputs import has_embeddings
from ..prefill.lease_slots import SharedSeats
from ..wire.handoff import Handoff, RankInfo, expanded
from ..wire.step_commands import SoftLease, StepCommands
from .cached_blocks import CachedBlocks
from .prefixes import MOST_DIGESTS, prefix_digests, shared_span, spans_of


class Answers:
    """The answers that a server offers to its clients' next turns. Nothing here waits.

    `seats` are lease slots of every worker that no other lease takes. Each offer expires after `ttl_s`. `counts` counts
    the offers by result.
    """

    def __init__(self, seats: SharedSeats, ttl_s: float, counts: Counter[str]) -> None:
        self._seats = seats
        self._ttl_s = ttl_s
        self._counts = counts
        self._cache: CachedBlocks | None = None

    def watch(self, pool: Any) -> None:
        """Follows the server's block pool from now on. Before, nothing is offered."""
        self._cache = CachedBlocks(pool)

    @property
    def pending(self) -> bool:
        """Whether leases are to end with the next step, which must come even if no request asks for it."""
        return self._cache is not None and self._cache.pending

    def offer(
        self,
        request: Any,
        blocks: Sequence[int],
        ranks: Sequence[RankInfo],
        commands: StepCommands,
        *,
        shared: bool = False,
    ) -> Handoff | None:
        """Offers the full blocks of a request that has just ended well, or returns None if there are none.

        `shared` offers them to servers that find them in a directory, whose digests are further apart.

        The last token of the answer was sampled and not computed. Tokens beyond it are drafts that were rejected, or
        were computed in advance.
        """
        if self._cache is None or not ranks or has_embeddings(request):
            return None
        own = ranks[0]
        block_tokens = own.block_tokens[0] * own.kernel_blocks[0]
        computed = min(len(request.all_token_ids) - 1, request.num_computed_tokens)
        full = self._cache.num_cached(blocks[: max(computed, 0) // block_tokens])
        num_digests, blocks_each = _shared_spans(full, block_tokens) if shared else spans_of(full)
        if not num_digests:
            self._counts["short"] += 1
            return None
        offered = blocks[: num_digests * blocks_each]
        num_tokens = len(offered) * block_tokens
        digests = prefix_digests(request, num_tokens, blocks_each * block_tokens)
        seat, name = self._seats.take(), name_of(request.request_id)
        ids = expanded(offered, own.kernel_blocks[0])
        self._cache.offer(
            offered, name if shared else ""
        )  # first: an offer that is not watched gives wrong bytes
        commands.offered.append(SoftLease(seat, ids, self._ttl_s))
        self._counts["shared" if shared else "offered"] += 1
        return Handoff(
            request_id=name,
            owners=tuple(rank.owner for rank in ranks),
            seats=(seat,),
            block_ids=(ids,),
            block_tokens=own.block_tokens,
            num_tokens=num_tokens,
            prompt=digests[-1].hex(),
            ttl_s=self._ttl_s,
            digests=PrefixDigests.of(digests),
            model=own.model,
        )

    def forward(self, ranks: Sequence[RankInfo], commands: StepCommands) -> None:
        """Tells the workers which offered blocks get new content in this step. Call it after the step is scheduled."""
        if self._cache is not None and self._cache.pending:
            commands.given_away = expanded(self._cache.take(), ranks[0].kernel_blocks[0])

    def take_ended(self) -> list[str]:
        """Returns the request ids of shared prefixes that lost a block since the last call."""
        return self._cache.take_ended() if self._cache is not None else []

    def forget(self, request_id: str) -> None:
        """Stops to watch for the end of a shared prefix."""
        if self._cache is not None:
            self._cache.forget(request_id)

    def reset(self) -> None:
        """Ends all offers with the next step."""
        if self._cache is not None:
            self._cache.withdraw_all()


def _shared_spans(num_blocks: int, block_tokens: int) -> tuple[int, int]:
    """Returns the number of digests and the blocks from one to the next, as `spans_of` does."""
    blocks = shared_span(block_tokens) // block_tokens
    return min(num_blocks // blocks, MOST_DIGESTS), blocks
