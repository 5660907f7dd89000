# SPDX-License-Identifier: Apache-2.0
"""When to try again to connect to an owner."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


@dataclass(slots=True)
class Attempts:
    """Back-off towards one owner after failed connects."""

    failures: int = 0
    not_before: float = 0.0
    last: str = ""

    def failed(self, why: str, now: float) -> None:
        """At `now`, by `time.monotonic()`."""
        self.failures += 1
        self.not_before = now + min(_FIRST_BACKOFF_S * 2 ** (self.failures - 1), _LONGEST_BACKOFF_S)
        self.last = why
