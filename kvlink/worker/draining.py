# SPDX-License-Identifier: Apache-2.0
"""Lets a worker end without its readers losing anything: it shows that it drains, and waits for them."""

from __future__ import annotations

import time

from kvlink.config.timeouts import checked
from kvlink.worker.prefixes import SharedPrefixes

_LOOK_EVERY_S = 0.01


class Draining(SharedPrefixes):
    """The part of a Worker that prepares its end. Thread-safe."""

    def drain(self, grace_s: float) -> bool:
        """Waits at most `grace_s` seconds until every offer that pins blocks has ended. Returns whether all have.

        Call it before `close`, when the server has ended its requests and takes no more: `close` ends the offers that
        are left, and their readers compute again. Offers can still be made and read meanwhile, and events be taken.
        Soft offers do not count. From the first call on the worker shows that it drains, also at the coordinator.
        """
        ends = time.monotonic() + checked(grace_s)
        self._control.on_loop("drain", self._membership.begin_drain)
        while self.lease_counts().active:
            if time.monotonic() >= ends:
                return False
            time.sleep(_LOOK_EVERY_S)
        return True
