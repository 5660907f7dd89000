# SPDX-License-Identifier: Apache-2.0
"""What is wrong with etcd at the moment, as far as a coordinator's own calls show it. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvlink.control.denials import LogQuota
from kvlink.control.values import StoreHealth

_log = logging.getLogger("kvlink.control")

_SAID_EVERY_S = 60.0


class Health:
    """`clock` counts seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._quota = LogQuota(1, _SAID_EVERY_S, clock)
        self.is_full = False

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

    def report(self) -> StoreHealth:
        """As of now."""
        return StoreHealth(self.is_full)
