# SPDX-License-Identifier: Apache-2.0
"""Tracks what is wrong with etcd, as far as a coordinator's own calls show it. The code is pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvlink.control.denials import LogQuota
from kvlink.control.values import StoreHealth

_log = logging.getLogger("kvlink.control")

_LOGGED_EVERY_S = 60.0
LOST_S = 3.0
"""The store counts as lost this long after the first doubt. An election takes less."""


class Health:
    """Tracks whether etcd is full, and whether the mirror is known to be up to date.

    `clock` returns monotonic seconds. `on_doubt` is called when `next_deadline` becomes earlier.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on_doubt: Callable[[], None] = lambda: None
        self.is_full = False
        self.is_lost = False
        self._clock = clock
        self._quota = LogQuota(1, _LOGGED_EVERY_S, clock)
        self._doubted_at = math.inf

    def note_full(self, error: Exception) -> None:
        """Notes that a write was refused for lack of space. It is logged at most once a minute."""
        self.is_full = True
        suppressed = self._quota.take()
        if suppressed is not None:
            _log.error("etcd is full, see the operator's guide suppressed=%d error=%s", suppressed, error)

    def note_room(self) -> None:
        """Notes that a write that needs space was executed."""
        if self.is_full:
            self.is_full = False
            _log.info("etcd has room again")

    def doubt(self) -> None:
        """Demands a proof, within `LOST_S` of the first demand, that the mirror has everything that etcd has."""
        if not self.is_doubted:
            self._doubted_at = self._clock()
            self.on_doubt()

    def proved(self) -> None:
        """Notes a proof that the mirror has everything that etcd has."""
        self._doubted_at = math.inf
        self.is_lost = False

    @property
    def is_doubted(self) -> bool:
        """Returns whether a proof is missing."""
        return self._doubted_at < math.inf

    def next_deadline(self) -> float:
        """Returns a time before which `expire` has nothing to do."""
        return math.inf if self.is_lost else self._doubted_at + LOST_S

    def expire(self) -> bool:
        """Returns True, once, if the proof has been missing for too long."""
        if self._clock() < self.next_deadline():
            return False
        self.is_lost = True
        return True

    def report(self) -> StoreHealth:
        """Returns the current health."""
        stale_s = self._clock() - self._doubted_at if self.is_doubted else 0.0
        return StoreHealth(self.is_full, self.is_lost, stale_s)
