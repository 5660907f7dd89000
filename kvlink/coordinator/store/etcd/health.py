# SPDX-License-Identifier: Apache-2.0
"""What is wrong with etcd at the moment, as far as a coordinator's own calls show it. Pure."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvlink.control.denials import LogQuota
from kvlink.control.values import StoreHealth

_log = logging.getLogger("kvlink.control")

_SAID_EVERY_S = 60.0
LOST_S = 3.0
"""From the first doubt on; an election takes less."""


class Health:
    """`clock` counts seconds and never goes back. `on_doubt` is called when `next_deadline` comes nearer."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.on_doubt: Callable[[], None] = lambda: None
        self.is_full = False
        self.is_lost = False
        self._clock = clock
        self._quota = LogQuota(1, _SAID_EVERY_S, clock)
        self._doubted_at = math.inf

    def note_full(self, error: Exception) -> None:
        """A write was refused for want of space. Logged once a minute, however many there are."""
        self.is_full = True
        unsaid = self._quota.take()
        if unsaid is not None:
            _log.error("etcd is full, see the operator's guide unsaid=%d error=%s", unsaid, error)

    def note_room(self) -> None:
        """A write that needs space was carried out."""
        if self.is_full:
            self.is_full = False
            _log.info("etcd has room again")

    def doubt(self) -> None:
        """From now on, unless doubted already, it has to be proved that the mirror has all that etcd has."""
        if not self.is_doubted:
            self._doubted_at = self._clock()
            self.on_doubt()

    def proved(self) -> None:
        """The mirror had all that etcd had when somebody asked."""
        self._doubted_at = math.inf
        self.is_lost = False

    @property
    def is_doubted(self) -> bool:
        """Whether a proof is missing."""
        return self._doubted_at < math.inf

    def next_deadline(self) -> float:
        """`expire` has nothing to do before."""
        return math.inf if self.is_lost else self._doubted_at + LOST_S

    def expire(self) -> bool:
        """True, once: the proof has been missing for too long."""
        if self._clock() < self.next_deadline():
            return False
        self.is_lost = True
        return True

    def report(self) -> StoreHealth:
        """As of now."""
        stale_s = self._clock() - self._doubted_at if self.is_doubted else 0.0
        return StoreHealth(self.is_full, self.is_lost, stale_s)
