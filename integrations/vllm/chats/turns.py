# SPDX-License-Identifier: Apache-2.0
"""Combines both parts of chats with several turns, of which a server without the option `bidirectional` has neither."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..prefill.announcements import Announcements
from ..prefill.lease_slots import SharedSeats
from ..prefill.outgoing import GroupIds
from ..settings import Settings
from ..wire.boundary import is_name
from ..wire.handoff import KEY, RankInfo
from ..wire.step_commands import StepCommands
from ..wire.stream_timing import LoadCost
from .answers import Answers
from .earlier_turns import ANSWER_AS, EarlierTurns
from .peer_prefixes import PeerPrefixes
from .prefix_lookups import PrefixLookups


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
