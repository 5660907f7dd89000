# SPDX-License-Identifier: Apache-2.0
"""Calls that were denied, in the log: each peer's first one, and no more lines than somebody can read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvlink.control.now import now

_log = logging.getLogger("kvlink.control")

_LINES = 10
_PER_S = 60.0
_MAX_SHOWN = 200
"""Characters of what a peer can choose."""


class LogQuota:
    """Allows at most `lines` lines in `per_s` seconds, and counts those that are left out."""

    def __init__(self, lines: int = _LINES, per_s: float = _PER_S, clock: Callable[[], float] = now) -> None:
        self._most = lines
        self._per_s = per_s
        self._clock = clock
        self._since = clock()
        self._written = 0
        self._unsaid = 0

    def take(self) -> int | None:
        """The number of lines left out before this one; None: this one is left out, too."""
        now = self._clock()
        if now - self._since >= self._per_s:
            self._since, self._written = now, 0
        if self._written >= self._most:
            self._unsaid += 1
            return None
        self._written += 1
        unsaid, self._unsaid = self._unsaid, 0
        return unsaid


class DenialLog:
    """Logs denied calls at a bounded rate; the next line after a silence says how many there were in between."""

    def __init__(self, lines: int = _LINES, per_s: float = _PER_S, clock: Callable[[], float] = now) -> None:
        self._quota = LogQuota(lines, per_s, clock)

    def note(self, method: str, peer: str, why: str) -> None:
        """Of one call."""
        unsaid = self._quota.take()
        if unsaid is not None:
            _log.warning(
                "denied method=%s peer=%s why=%s unsaid=%d",
                method[:_MAX_SHOWN],
                peer,
                why[:_MAX_SHOWN],
                unsaid,
            )
