# SPDX-License-Identifier: Apache-2.0
"""Calls a store when something of it is due. An exception of that call does not end the calls."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from kvlink.runtime.backoff import Backoff
from kvlink.runtime.supervised import guarded


class Alarm:
    """Calls `ring(late_s)` on the running event loop, `late_s` seconds after the time that was set.

    `ring` returns when it wants to be called next, by `clock` in seconds. After an exception it is called again after a
    back-off, because what it left undone may still be due.
    """

    def __init__(self, ring: Callable[[float], float], clock: Callable[[], float]) -> None:
        self._ring = ring
        self._clock = clock
        self._backoff = Backoff()
        self._timer: asyncio.TimerHandle | None = None
        self.due = math.inf
        """When it rings next."""

    def set(self, due: float) -> None:
        """Makes it ring at `due`, unless it rings earlier."""
        if due >= self.due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.due = due
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, due - self._clock())
        self._timer = loop.call_at(at, guarded("store timer", self._wake), at)

    def close(self) -> None:
        """Ends the calls for good. Closing again has no effect."""
        if self._timer is not None:
            self._timer.cancel()
        self.due = -math.inf

    def _wake(self, at: float) -> None:
        late_s = asyncio.get_running_loop().time() - at
        self.due = math.inf
        try:
            due = self._ring(late_s)
            self._backoff.reset()
        except BaseException:
            due = self._clock() + self._backoff.delay_s()
            raise
        finally:
            self.set(due)
