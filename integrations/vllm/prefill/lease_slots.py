# SPDX-License-Identifier: Apache-2.0
"""Tracks which lease slots of the workers are free. The scheduler chooses them, so that it can write tickets itself."""

from __future__ import annotations

import itertools
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

    def give_back(self, seats: tuple[LeaseSeat, ...]) -> None:
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
