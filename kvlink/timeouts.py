# SPDX-License-Identifier: Apache-2.0
"""What a caller may give as a timeout: seconds, of which 0 means now."""

from __future__ import annotations

from kvlink.errors import ConfigError


def checked(timeout_s: float) -> float:
    """The same number. Raises ConfigError when it is negative or not a number."""
    if not timeout_s >= 0:
        raise ConfigError(f"timeout_s={timeout_s!r} must be at least 0 s; 0 means now")
    return timeout_s


def given_or(timeout_s: float | None, default_s: float) -> float:
    """`default_s` when none is given; 0 is one. Raises ConfigError as `checked` does."""
    return default_s if timeout_s is None else checked(timeout_s)
