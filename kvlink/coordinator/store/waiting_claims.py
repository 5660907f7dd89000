# SPDX-License-Identifier: Apache-2.0
"""Keeps the claims that wait at this coordinator, by request. The code is pure."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import MAX_RANKS, Limits
from kvlink.control.values import Claim
from kvlink.coordinator.store import refusals

W = TypeVar("W", bound=Hashable)

MAX_DUE = 256
"""So many of what is due at a time end in one turn of the loop: about a millisecond."""


class WaitingClaims(Generic[W]):
    """Orders waiting claims. The newest is served first: an earlier one of the same reader was most likely given up.

    The caller identifies claims by any hashable value, their waiter.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._claims: dict[W, Claim] = {}
        self._by_request: dict[str, dict[W, None]] = {}
        self._patience: Deadlines[W] = Deadlines()

    def __len__(self) -> int:
        return len(self._claims)

    def add(self, claim: Claim, waiter: W, due: float) -> None:
        """Adds a claim that times out at `due`. Raises RefusedError (TOO_MANY)."""
        if len(self) >= self._limits.waiting_claims:
            raise refusals.too_many_claims(len(self))
        self._claims[waiter] = claim
        self._by_request.setdefault(claim.request_id, {})[waiter] = None
        self._patience.set(waiter, due)

    def remove(self, waiter: W) -> Claim | None:
        """Removes a claim and returns it, or None if it does not wait."""
        claim = self._claims.pop(waiter, None)
        if claim is not None:
            self._patience.discard(waiter)
            waiters = self._by_request[claim.request_id]
            del waiters[waiter]
            if not waiters:
                del self._by_request[claim.request_id]
        assert len(self._by_request) <= len(self._claims)
        return claim

    def of(self, request_id: str) -> list[W]:
        """Returns the first waiters of one request, in the order in which they are served: as many as it may have."""
        return list(islice(reversed(self._by_request.get(request_id, {})), MAX_RANKS))

    def all(self) -> list[W]:
        """Returns all waiters."""
        return list(self._claims)

    def next_deadline(self) -> float:
        """Returns a time before which no claim times out."""
        return self._patience.next()

    def due(self, now: float) -> list[W]:
        """Returns some waiters whose claims have timed out. They stay until they are removed."""
        return self._patience.due(now, MAX_DUE)
