# SPDX-License-Identifier: Apache-2.0
"""When a worker gives its coordinator up for silent. Pure: takes the time as a value."""

from __future__ import annotations

import math
from collections import deque

from kvlink.control.values import Membership

PATIENCE = 2 / 3
"""Of a lease, from the last beat that was answered. The rest of the lease is for joining elsewhere."""
_SPREAD_S = 3.0
"""All workers notice at once that a coordinator is gone; their joins would hold up the next one for seconds."""


class Beats:
    """The beats on one keep-alive stream, answered in order. A lease begins when its beat arrives, so it is counted
    from when that was sent.
    """

    def __init__(self, membership: Membership, now: float) -> None:
        self._lease_s = membership.lease_s
        self._keep_alive_s = membership.keep_alive_s
        self._renewed = now
        self._unanswered: deque[float] = deque()

    def sent(self, now: float) -> None:
        """A beat is on its way."""
        self._unanswered.append(now)

    def answered(self) -> None:
        """The oldest beat under way has arrived."""
        if self._unanswered:
            self._renewed = self._unanswered.popleft()

    def give_up_at(self) -> float:
        """The coordinator counts as gone when it has not answered by then; `math.inf` while no beat is under way."""
        return self._renewed + PATIENCE * self._lease_s if self._unanswered else math.inf

    def spread_s(self, now: float) -> float:
        """How long this worker may wait before it joins again: at most half of what is left of its lease."""
        left_s = max(0.0, self._renewed + self._lease_s - now)
        return min(self._keep_alive_s, _SPREAD_S, left_s / 2)
