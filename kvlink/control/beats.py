# SPDX-License-Identifier: Apache-2.0
"""Decides when a worker gives up on a silent coordinator. The code is pure and takes the time as a value."""

from __future__ import annotations

import math
from collections import deque

from kvlink.control.values import Membership

PATIENCE = 2 / 3
"""The worker waits this fraction of a lease after its last answered beat, and uses the rest to join elsewhere."""
_SPREAD_S = 3.0
"""All workers notice a lost coordinator at once. Without a spread, their joins would delay the next one for seconds."""


class Beats:
    """Tracks the beats on one keep-alive stream, which are answered in order.

    A lease begins when its beat arrives at the coordinator, so it is counted from the time the beat was sent.
    """

    def __init__(self, membership: Membership, now: float) -> None:
        self._lease_s = membership.lease_s
        self._keep_alive_s = membership.keep_alive_s
        self._renewed = now
        self._unanswered: deque[float] = deque()

    def sent(self, now: float) -> None:
        """Notes that a beat was sent."""
        self._unanswered.append(now)

    def answered(self) -> None:
        """Notes that the oldest outstanding beat was answered."""
        if self._unanswered:
            self._renewed = self._unanswered.popleft()

    def give_up_at(self) -> float:
        """Returns when the coordinator counts as gone unless it answers, or `math.inf` while no beat is outstanding."""
        return self._renewed + PATIENCE * self._lease_s if self._unanswered else math.inf

    def spread_s(self, now: float) -> float:
        """Returns how many seconds this worker may wait before it rejoins: at most half of the rest of its lease."""
        left_s = max(0.0, self._renewed + self._lease_s - now)
        return min(self._keep_alive_s, _SPREAD_S, left_s / 2)
