# SPDX-License-Identifier: Apache-2.0
"""When to try again to connect to an owner, and when to give it up."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.backoff import FIRST_S, LONGEST_S

_SILENCE_S = 10.0
"""What an owner gets at least that neither refuses nor answers. Its host may be gone, but it or we may only be slow."""
_SILENCE_SHARE = 1 / 3
"""Of the time that a reader has: who gives its pulls more expects a slow host. The rest is for computing instead."""


_REMEMBERED_S = 60.0
"""Far longer than any back-off. Owners that died would stay for ever."""


@dataclass(slots=True)
class Attempts:
    """Back-off towards one owner after failed connects. Times are by `time.monotonic()`."""

    failures: int = 0
    not_before: float = 0.0
    last: str = ""
    _silent_since: float | None = None

    def forgotten(self, now: float) -> bool:
        """Whether they say nothing any more of what the next one should do."""
        return self.failures > 0 and now - self.not_before > _REMEMBERED_S

    def failed(self, why: str, began: float, now: float, silent: bool) -> None:
        """An attempt that `began` has ended. `silent`: nobody refused it."""
        self.failures += 1
        self.not_before = now + min(FIRST_S * 2 ** (self.failures - 1), LONGEST_S)
        self.last = why
        if not silent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = began

    def may_be_slow(self, now: float, allowed_s: float) -> bool:
        """Whether the owner has only been silent, and not for long by the seconds that its reader has."""
        patience_s = max(_SILENCE_S, allowed_s * _SILENCE_SHARE)
        return self._silent_since is not None and now - self._silent_since < patience_s
