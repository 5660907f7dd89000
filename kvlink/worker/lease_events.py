# SPDX-License-Identifier: Apache-2.0
"""Tells a program which of its offers have ended, so that it may write their blocks again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from kvlink.config.timeouts import checked
from kvlink.transfer.completion import each_ended, when_ended
from kvlink.transfer.engine import Engine, LeaseCounts
from kvlink.transfer.offers import Offers
from kvlink.types import LeaseEvent


class LeaseEvents:
    """The part of a Worker that reports the ends of its offers. Thread-safe."""

    _engine: Engine
    offers: Offers
    """The live offers. `grant_at` serves schedulers that create tickets themselves."""

    def events(self) -> list[LeaseEvent]:
        """Returns the offers that ended since the last call, whose blocks may be written again. Never blocks."""
        return self.offers.events()

    def lease_counts(self) -> LeaseCounts:
        """Returns the counts of this worker's offers by outcome."""
        return self._engine.lease_counts()

    def watch_events(self) -> AsyncIterator[LeaseEvent]:
        """Yields offers as they end, on the running event loop, until this worker is closed."""
        return when_ended(self._engine, self.offers.events)

    def watch_events_blocking(self, timeout_s: float | None = None) -> Iterator[LeaseEvent]:
        """Yields like `watch_events` on the calling thread, and ends if no offer has ended for `timeout_s` seconds."""
        limit_s = None if timeout_s is None else checked(timeout_s)
        return each_ended(self._engine, self.offers.events, limit_s)
