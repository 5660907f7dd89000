# SPDX-License-Identifier: Apache-2.0
"""Combines both parts of chats with several turns, of which a server without the option `bidirectional` has neither."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvlink.ticket.prefix_digests import PrefixDigests

from ...request_names import name_of
from ..model.prompt_inputs import has_embeddings
from ..prefill.announcements import Announcements
from ..prefill.lease_slots import SharedSeats
from ..prefill.outgoing import GroupIds
from ..settings import Settings
from ..wire.boundary import is_name
from ..wire.handoff import KEY, Handoff, RankInfo, expanded
from ..wire.step_commands import SoftLease, StepCommands
from ..wire.stream_timing import LoadCost
from .cached_blocks import CachedBlocks
from .earlier_turns import ANSWER_AS, EarlierTurns
from .peer_prefixes import PeerPrefixes
from .prefix_lookups import MOST_DIGESTS, PrefixLookups, prefix_digests, shared_span, spans_of


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


class Turns:
    """The turns of a server's chats. `seats` are those of `Answers`; None turns everything off.

    With `announcements`, streamed answers are offered too. With `peers`, other servers find the prefixes;
    if not `bidirectional`, that is all.
    """

    def __init__(
        self,
        seats: SharedSeats | None = None,
        ttl_s: float = 0.0,
        announcements: Announcements | None = None,
        *,
        bidirectional: bool = True,
        peers: PeerPrefixes | None = None,
    ) -> None:
        self._counts: Counter[str] = Counter()
        self._announcements = announcements
        self._bidirectional = bidirectional
        self.peers = peers
        self.lookups = PrefixLookups(peers, self._counts) if peers is not None else None
        self.answers = Answers(seats, ttl_s, self._counts) if seats is not None else None
        self.earlier = EarlierTurns(self._counts, announcements, self.lookups) if seats is not None else None

    @classmethod
    def of(cls, settings: Settings, announcements: Announcements | None) -> Turns:
        """Returns what the settings turn on."""
        if not settings.offers_softly:
            return cls()
        first, num_slots = settings.pinning_slots + 1, settings.worker.lease_slots - settings.pinning_slots
        peers = None
        if settings.share_prefixes:
            peers = PeerPrefixes(settings.worker.coordinator, num_slots)
        seats = SharedSeats(first, num_slots)
        return cls(seats, settings.answer_s, announcements, bidirectional=settings.bidirectional, peers=peers)

    def use_costs(self, cost: Callable[[str], LoadCost | None]) -> None:
        """Decides from now on by these costs of loads from a worker's server."""
        if self.lookups is not None:
            self.lookups.cost = cost

    def step_began(self, num_tokens: int) -> None:
        """Notes that a step computes so many tokens. Another one has ended."""
        if self.lookups is not None:
            self.lookups.step_began(num_tokens)

    def arrived(self, request: Any) -> None:
        """Registers a request before it is scheduled."""
        if self.earlier is not None:
            self.earlier.arrived(request)

    def num_matched(self, request: Any, num_computed: int, ranks: Sequence[RankInfo] = ()) -> int | None:
        """Returns the number of tokens of earlier turns to pull beyond those computed. None: not known yet."""
        return self.earlier.num_matched(request, num_computed, ranks) if self.earlier is not None else 0

    def begins(
        self, request: Any, into: tuple[array[int], ...], num_external: int, commands: StepCommands
    ) -> bool:
        """Starts the load of earlier turns, for which blocks exist now. Returns whether there is one."""
        return self.earlier is not None and self.earlier.begins(request, into, num_external, commands)

    def forward(self, ranks: Sequence[RankInfo], commands: StepCommands) -> None:
        """Tells the workers which offered blocks get new content in the step that was scheduled."""
        if self.answers is not None:
            self.answers.forward(ranks, commands)

    def model_changed(self) -> None:
        """Withdraws what was published: it belongs to the model before."""
        if self.peers is not None:
            self.peers.withdraw_all()

    def withdraw_ended(self) -> None:
        """Removes shared prefixes that lost a block from the directories."""
        if self.answers is not None and self.peers is not None:
            for request_id in self.answers.take_ended():
                self.peers.withdraw(request_id)

    @property
    def pending(self) -> bool:
        """Whether a step must come without a request, to end the offers of a cache that was reset."""
        return self.answers is not None and self.answers.pending

    def reset(self) -> None:
        """Ends all offers with the next step."""
        if self.answers is not None:
            self.answers.reset()

    def ended(
        self,
        request: Any,
        block_ids: GroupIds,
        engine_id: str,
        ranks: Sequence[RankInfo],
        commands: StepCommands,
        *,
        complete: bool,
    ) -> dict[str, Any] | None:
        """Returns what the answer of a request carries that is not handed off; None without an offer."""
        params = request.kv_transfer_params
        self.step_began(0)
        self.abandon(request.request_id)
        if self.answers is None or not complete:
            return None
        if not self._bidirectional or not params or params.get("do_remote_decode"):
            self.share(request, block_ids, ranks, commands)
            return None
        handoff = self.answers.offer(request, block_ids[0], ranks, commands)
        if handoff is None:
            return None
        output = handoff.to_answer(engine_id)
        name = params.get(ANSWER_AS)
        if self._announcements is not None and is_name(name):
            ticket = json.dumps({KEY: output[KEY]}).encode()
            self._announcements.announce(name, 0, handoff.owners[0], handoff.ttl_s, ticket, None)
        return output

    def abandon(self, request_id: str) -> None:
        """Forgets what an earlier turn has for a request."""
        if self.earlier is not None:
            self.earlier.ended(request_id)

    def share(
        self, request: Any, block_ids: GroupIds, ranks: Sequence[RankInfo], commands: StepCommands
    ) -> None:
        """Lets peers find the prefix of a request that has just ended well, whether it is handed off or not."""
        if self.peers is None or self.answers is None:
            return
        self.step_began(0)
        handoff = self.answers.offer(request, block_ids[0], ranks, commands, shared=True)
        if handoff is not None and (ended := self.peers.publish(handoff, ranks[0].scope)):
            self.answers.forget(ended)

    def close(self) -> None:
        """Closes the connections to the directories. Idempotent."""
        if self.peers is not None:
            self.peers.close()

    def take_counts(self) -> dict[str, int]:
        """Returns and resets the counts, by result."""
        counts = dict(self._counts)
        self._counts.clear()
        return counts
