# SPDX-License-Identifier: Apache-2.0
"""Derives the time of a read from LMCache's: afterwards LMCache gives the memory of the read to another object."""

from __future__ import annotations

from kvlink.errors import ConfigError

DEFAULT_S = 20.0
MARGIN_S = 1.0
"""A read ends so long before LMCache gives up on it."""
_LEAST_S = 1.0


def longest_read_s(load_timeout_s: float) -> float:
    """Returns the most seconds that a read may take. Raises ConfigError if LMCache gives up too early."""
    if not load_timeout_s >= _LEAST_S + MARGIN_S:
        raise ConfigError(
            f"--p2p-load-timeout {load_timeout_s:g}: a read must end {MARGIN_S:g} s before LMCache gives up on it; set "
            f"it to {_LEAST_S + MARGIN_S:g} or more"
        )
    return load_timeout_s - MARGIN_S


def read_timeout_s(load_timeout_s: float, configured_s: float | None) -> float:
    """Returns the time of a read. `configured_s` is KVLINK_TIMEOUT_S if it is set. Raises ConfigError."""
    longest_s = longest_read_s(load_timeout_s)
    if configured_s is None:
        return min(DEFAULT_S, longest_s)
    if not configured_s <= longest_s:
        raise ConfigError(
            f"KVLINK_TIMEOUT_S is {configured_s:g} and --p2p-load-timeout {load_timeout_s:g}: reads would go on after "
            f"LMCache has given up on them; set KVLINK_TIMEOUT_S to at most {longest_s:g}, or unset it"
        )
    return configured_s
