# SPDX-License-Identifier: Apache-2.0
"""Decides which leases at prefill servers are renewed, and when that ends. Pure: times are values, in seconds.

A timer alone would renew a lease for as long as the process lives, also while the engine is paused or hangs, and
prefill could never free the blocks. So a lease is renewed only while the engine makes progress.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ..wire.handoff import Handoff, Owner

STILL_S = 10.0
"""The least time without progress after which renewals stop. It is a lease's time if that is longer.

A step may take long: the first one of several ranks compiles, and a long prompt computes for seconds on a CPU.
"""
LONGEST_S = 600.0
"""The longest time that a request's lease is renewed. The clients of OpenAI's libraries give up by then."""

Seat = tuple[int, int]
"""The slot of a seat and its settle nonce."""


@dataclass(slots=True)
class _Watched:
    handoff: Handoff
    since: float
    due: float
    loading: bool = False
    let_go: bool = False


class Renewals:
    """The handoffs of requests that wait here. `now` is the time of the first one's clock, and never goes back.

    Progress is a step that computes tokens or asks for waiting requests. A paused engine makes such steps only for
    requests that it still answers, although it may step for another reason: handoffs of its own that others read. For
    a load that was started every step is progress, because steps take its result.

    So a lease outlives the last progress by two of its own lengths, or by 10 s and one length if that is more.
    """

    def __init__(self, now: float) -> None:
        self._watched: dict[str, _Watched] = {}
        self._stepped = self._advanced = now

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, request_id: str, handoff: Handoff, now: float) -> None:
        """Renews from now on. The first time is due at once."""
        self._watched[request_id] = _Watched(handoff, now, due=now)

    def forget(self, request_id: str) -> None:
        """Stops renewing: the request is being read, or will not be. Idempotent."""
        self._watched.pop(request_id, None)

    def stepped(self, now: float, *, advanced: bool) -> None:
        """Notes a step of the engine; `advanced`: it computes tokens, or asked for requests that wait."""
        self._stepped = now
        if advanced:
            self._advanced = now

    def loading(self, request_id: str) -> None:
        """Notes that the workers load the request."""
        if (watched := self._watched.get(request_id)) is not None:
            watched.loading = True

    def has_let_go(self, request_id: str) -> bool:
        """Returns whether its renewals have stopped, so that the lease has ended or soon will."""
        return (watched := self._watched.get(request_id)) is not None and watched.let_go

    def still_s(self, now: float) -> float:
        """Returns how long ago the engine made progress."""
        return now - self._advanced

    def let_go(self, now: float) -> list[str]:
        """Stops what is due and has no reader that makes progress. Returns the ids of these requests."""
        stopped = [
            request_id
            for request_id, watched in list(self._watched.items())
            if not watched.let_go and watched.due <= now and not self._progresses(watched, now)
        ]
        for request_id in stopped:
            if (watched := self._watched.get(request_id)) is not None:  # another thread forgets
                watched.let_go = True
        return stopped

    def due(self, now: float) -> dict[Owner, list[Seat]]:
        """Returns what to renew now, by owner. It is due again after a third of its lease."""
        seats: dict[Owner, dict[Seat, None]] = defaultdict(dict)
        for watched in list(self._watched.values()):
            if watched.let_go or watched.due > now:
                continue
            watched.due = now + watched.handoff.ttl_s / 3
            mine = dict.fromkeys((seat.slot, seat.settle_nonce) for seat in watched.handoff.seats)
            for owner in watched.handoff.owners:
                seats[owner].update(mine)
        return {owner: list(theirs) for owner, theirs in seats.items()}

    def _progresses(self, watched: _Watched, now: float) -> bool:
        last = max(self._stepped if watched.loading else self._advanced, watched.since)
        patience_s = max(watched.handoff.ttl_s, STILL_S)
        return now - last <= patience_s and now - watched.since <= LONGEST_S
