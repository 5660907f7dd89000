# SPDX-License-Identifier: Apache-2.0
"""Offers blocks that are not pinned, and ends those offers before the blocks get new content."""

from __future__ import annotations

from collections.abc import Sequence

from kvlink.ticket import LeaseSeat, Ticket
from kvlink.transfer import soft_offers
from kvlink.transfer.engine import SoftLeaseCounts
from kvlink.transfer.group_ids import GroupIds, NumTokens
from kvlink.types import WorkerCard
from kvlink.worker.lease_events import LeaseEvents


class SoftLeases(LeaseEvents):
    """The part of a Worker that offers cached blocks. Thread-safe."""

    card: WorkerCard

    def offer_soft(
        self,
        request_id: str,
        block_ids: GroupIds,
        *,
        num_tokens: NumTokens | None = None,
        digests: Sequence[bytes] = (),
        ttl_s: float | None = None,
        trace: str = "",
    ) -> Ticket:
        """Offers blocks without pinning them, and returns the ticket. Makes no remote call.

        Any number of readers pull with the ticket, as often as they like, and none settles it. The blocks remain in the
        engine's own cache. Before the engine gives one of them new content, it must call `revoke`; a reader that comes
        later gets StaleBlocks and recomputes. No event follows. A request that has grown is offered again: each call
        gives a ticket of its own, and older tickets of the request remain valid.

        The offer ends by `revoke`, by its `ttl_s`, with the worker, or when lease slots run out: the oldest soft offer
        then makes room, also for `offer`.

        block_ids: as for `offer`. Full blocks, whose content a finished step has written and no later step changes.
        num_tokens: as for `offer`; by default as many as fit, and no block may be partial.
        digests: of prefixes of the tokens at equal distances, usually one for each block; 8 to 64 bytes each. A reader
            finds the part that it has in common by `Ticket.common_tokens`.
        ttl_s: seconds after which the offer ends; by default it does not expire.
        trace: as for `offer`.
        Raises ConfigError for invalid arguments, and if offers that pin blocks have all lease slots.
        """
        return soft_offers.offer_soft(
            self._engine,
            self.card,
            request_id,
            block_ids,
            num_tokens,
            digests,
            ttl_s,
            trace,
            self.offers.sign,
        )

    def grant_soft_at(
        self,
        seat: LeaseSeat,
        block_ids: GroupIds,
        *,
        num_tokens: NumTokens | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """Takes the lease of `offer_soft` at a seat that the caller chose, for schedulers that create tickets.

        seat: a slot of 1 to KVLINK_LEASE_SLOTS, a random nonce, and SHARED_SEAT. A soft offer that has the slot ends.
        Raises ConfigError as `offer_soft` does, and if an offer that pins blocks has the slot.
        """
        soft_offers.grant_soft_at(self._engine, seat, block_ids, num_tokens, ttl_s)

    def revoke(self, block_ids: GroupIds) -> int:
        """Ends the soft offers that cover one of these blocks. On return the blocks may get new content.

        Call it in each step, on every rank, with the blocks that the step gives new content, before the first kernel or
        load writes one. What readers read later does not validate, and over tcp it is not even sent. Offers that pin
        blocks are not affected. A block that no soft offer covers costs a few nanoseconds. array("I") or contiguous
        numpy uint32 is fastest. With several cache groups, one list or a list for each; a number names a block of every
        group.

        Returns the number of offers that ended. Raises ConfigError for anything but block ids.
        """
        return soft_offers.revoke(self._engine, block_ids)

    def soft_lease_counts(self) -> SoftLeaseCounts:
        """Returns the counts of this worker's soft offers."""
        return self._engine.soft_lease_counts()
