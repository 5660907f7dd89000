# SPDX-License-Identifier: Apache-2.0
"""Checks timeouts that a caller passes, in seconds. A timeout of 0 means not to wait."""

from __future__ import annotations

from numbers import Real

from kvlink.errors import ConfigError
from kvlink.runtime.names import check_kind


def checked(timeout_s: float) -> float:
    """Returns `timeout_s`. Raises ConfigError if it is negative or not a number."""
    check_kind(timeout_s, Real, "timeout_s", "a number of seconds")
    if not timeout_s >= 0:
        raise ConfigError(f"timeout_s={timeout_s!r} must be at least 0 s; 0 means now")
    return timeout_s


def given_or(timeout_s: float | None, default_s: float) -> float:
    """Returns `timeout_s`, or `default_s` if it is None. Raises ConfigError as `checked` does."""
    return default_s if timeout_s is None else checked(timeout_s)
