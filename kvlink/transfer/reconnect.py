# SPDX-License-Identifier: Apache-2.0
"""Decides when to try again to connect to an owner, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.runtime.backoff import doubled_s

_SILENCE_S = 10.0
"""The shortest time for an owner that neither refuses nor answers. Its host may be down, but the owner or this process
may also only be slow."""
_SILENCE_SHARE = 1 / 3
"""The share of the reader's timeout for such an owner. A longer timeout allows for a slower host, and the rest of it is
for computing the request instead."""
_EXPIRES_S = 60.0
"""A back-off without a new attempt is dropped after this time, which is far longer than any delay. Otherwise those of
dead owners would accumulate."""


@dataclass(slots=True)
class ReconnectBackoff:
    """The back-off for one owner after failed attempts. Times refer to `time.monotonic()`."""

    failures: int = 0
    not_before: float = 0.0
    last: str = ""
    _silent_since: float | None = None

    def is_expired(self, now: float) -> bool:
        """Returns whether the last failure is too old to matter for the next attempt."""
        return self.failures > 0 and now - self.not_before > _EXPIRES_S

    def failed(self, why: str, began: float, now: float, silent: bool) -> None:
        """Records that an attempt started at `began` has failed. `silent` says that there was no answer at all."""
        self.failures += 1
        self.not_before = now + doubled_s(self.failures)
        self.last = why
        if not silent:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = began

    def may_be_slow(self, now: float, allowed_s: float) -> bool:
        """Returns whether the owner has not answered for a short time only, given the `allowed_s` of its reader."""
        longest_s = max(_SILENCE_S, allowed_s * _SILENCE_SHARE)
        return self._silent_since is not None and now - self._silent_since < longest_s
