# SPDX-License-Identifier: Apache-2.0
"""Logs denied calls and other repeated events at a bounded rate."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvlink.control.now import now

_log = logging.getLogger("kvlink.control")

_MAX_SHOWN = 200
"""Bounds the characters of a text that a peer chooses."""


class LogQuota:
    """Allows at most `lines` log lines in `per_s` seconds, and counts the suppressed ones."""

    def __init__(self, lines: int = 10, per_s: float = 60.0, clock: Callable[[], float] = now) -> None:
        self._most = lines
        self._per_s = per_s
        self._clock = clock
        self._since = clock()
        self._written = 0
        self._suppressed = 0

    def take(self) -> int | None:
        """Returns the number of lines suppressed before this one, or None if this line must be suppressed too."""
        now = self._clock()
        if now - self._since >= self._per_s:
            self._since, self._written = now, 0
        if self._written >= self._most:
            self._suppressed += 1
            return None
        self._written += 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class DenialLog(LogQuota):
    """Logs denied calls at a bounded rate. Each line says how many were suppressed before it."""

    def note(self, method: str, peer: str, why: str) -> None:
        """Logs one denied call, or counts it as suppressed."""
        suppressed = self.take()
        if suppressed is not None:
            _log.warning(
                "denied method=%s peer=%s why=%s suppressed=%d",
                method[:_MAX_SHOWN],
                peer,
                why[:_MAX_SHOWN],
                suppressed,
            )
