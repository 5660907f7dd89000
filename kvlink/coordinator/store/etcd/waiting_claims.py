# SPDX-License-Identifier: Apache-2.0
"""Keeps the claims that wait at this coordinator, by request. The code is pure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.values import Claim
from kvlink.coordinator.store import refusals


@dataclass(slots=True, eq=False)
class Waiter:
    """Holds one waiting claim. The caller may cancel `answer` at any time."""

    claim: Claim
    answer: asyncio.Future[list[bytes]]
    tries: int = 0
    """Number of times that its record could not be written because etcd had changed."""


class WaitingClaims:
    """Orders waiting claims. The newest is served first: an earlier one of the same reader was most likely given up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_request: dict[str, dict[Waiter, None]] = {}
        self._patience: Deadlines[Waiter] = Deadlines()

    def __len__(self) -> int:
        return len(self._patience)

    def add(self, waiter: Waiter, due: float) -> None:
        """Adds a claim that times out at `due`. Raises Refused (TOO_MANY)."""
        if len(self) >= self._limits.waiting_claims:
            raise refusals.too_many_claims(len(self))
        self._by_request.setdefault(waiter.claim.request_id, {})[waiter] = None
        self._patience.set(waiter, due)

    def remove(self, waiter: Waiter) -> None:
        """Removes a claim if it is present."""
        self._patience.discard(waiter)
        name = waiter.claim.request_id
        waiters = self._by_request.get(name)
        if waiters is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self._by_request[name]

    def of(self, request_id: str) -> list[Waiter]:
        """Returns the claims of one request, in the order in which they are served."""
        return list(reversed(self._by_request.get(request_id, {})))

    def all(self) -> list[Waiter]:
        """Returns all waiting claims."""
        return [waiter for waiters in self._by_request.values() for waiter in waiters]

    def next_deadline(self) -> float:
        """Returns a time before which no claim times out."""
        return self._patience.next()

    def due(self, now: float) -> list[Waiter]:
        """Returns the claims that have timed out. They stay until they are removed."""
        return self._patience.due(now)
