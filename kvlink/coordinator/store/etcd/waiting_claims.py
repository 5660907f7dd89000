# SPDX-License-Identifier: Apache-2.0
"""Claims that wait at this coordinator, by request. Pure."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.values import Claim
from kvlink.coordinator.store import refusals


@dataclass(slots=True, eq=False)
class Waiter:
    """One claim. `answer` may be cancelled by its caller at any time."""

    claim: Claim
    answer: asyncio.Future[list[bytes]]
    tries: int = 0
    """Records for it that were not written, as something had changed."""


class Waiting:
    """Served last come, first: an earlier claim of the same reader is most likely one that was given up."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._by_request: dict[str, dict[Waiter, None]] = {}
        self._patience: Deadlines[Waiter] = Deadlines()

    def __len__(self) -> int:
        return len(self._patience)

    def add(self, waiter: Waiter, due: float) -> None:
        """Raises Refused (TOO_MANY)."""
        if len(self) >= self._limits.waiting_claims:
            raise refusals.too_many_claims(len(self))
        self._by_request.setdefault(waiter.claim.request_id, {})[waiter] = None
        self._patience.set(waiter, due)

    def remove(self, waiter: Waiter) -> None:
        """Idempotent."""
        self._patience.discard(waiter)
        name = waiter.claim.request_id
        waiters = self._by_request.get(name)
        if waiters is not None:
            waiters.pop(waiter, None)
            if not waiters:
                del self._by_request[name]

    def of(self, request_id: str) -> list[Waiter]:
        """Those of one request, in the order in which they are served."""
        return list(reversed(self._by_request.get(request_id, {})))

    def all(self) -> list[Waiter]:
        """Everybody."""
        return [waiter for waiters in self._by_request.values() for waiter in waiters]

    def next_deadline(self) -> float:
        """Nobody has waited long enough before."""
        return self._patience.next()

    def due(self, now: float) -> list[Waiter]:
        """Those who have waited long enough. They stay until removed."""
        return self._patience.due(now)
