# SPDX-License-Identifier: Apache-2.0
"""Tracks which lease slots of the workers are free. The scheduler chooses them, so that it can write tickets itself."""

from __future__ import annotations

import itertools
import re
import secrets
from collections import deque

from kvlink.ticket import SHARED_SEAT, SMALLEST_NONCE, LeaseSeat


class SlotGroups:
    """Groups of `seats` slots. Takes the longest unused first, so late writes of an earlier reader have arrived."""

    def __init__(self, num_slots: int, seats: int) -> None:
        self._seats = seats
        self._free = deque(range(1, num_slots - seats + 1, seats))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> tuple[LeaseSeat, ...] | None:
        """Returns seats with fresh nonces, or None if every slot is taken."""
        if not self._free:
            return None
        first = self._free.popleft()
        return tuple(LeaseSeat(first + index, _nonce(), _nonce()) for index in range(self._seats))

    def release(self, seats: tuple[LeaseSeat, ...]) -> None:
        """Frees the slots of leases that have ended on every worker."""
        self._free.append(seats[0].slot)


class SharedSeats:
    """Slots of soft leases, from slot `first` on, in turn: a new lease takes the slot of the oldest."""

    def __init__(self, first: int, num_slots: int) -> None:
        self._slots = itertools.cycle(range(first, first + num_slots))

    def take(self) -> LeaseSeat:
        """Returns the next seat, with a fresh nonce."""
        return LeaseSeat(next(self._slots), _nonce(), SHARED_SEAT)


def _nonce() -> int:
    return secrets.randbelow(2**64 - SMALLEST_NONCE) + SMALLEST_NONCE


_CHILD = re.compile(r"\d+_(.+)", re.DOTALL)
"""vLLM names the requests that it makes from one with n above 1 after it: 0_name, 1_name, …"""


class SentTickets:
    """The requests of one server, from the handoff until every worker has reported the lease's end."""

    def __init__(self) -> None:
        self._family_of: dict[str, tuple[str, str] | None] = {}
        self._newest: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._family_of)

    def add(self, request_id: str, prompt: str) -> list[str]:
        """Adds a request that is handed off. Returns those that it replaces. `prompt` is the digest of its prompt.

        These are children of one request with n above 1, whose answer carries only the last one's ticket.
        """
        child = _CHILD.fullmatch(request_id)
        family = (child[1], prompt) if child else None
        self._family_of[request_id] = family
        if family is None:
            return []
        earlier = self._newest.get(family)
        self._newest[family] = request_id
        return [earlier] if earlier is not None else []

    def ended(self, request_id: str) -> None:
        """Removes a request whose lease has ended on every worker. Idempotent."""
        family = self._family_of.pop(request_id, None)
        if family is not None and self._newest.get(family) == request_id:
            del self._newest[family]

    def all(self) -> list[str]:
        """Returns all requests."""
        return list(self._family_of)
