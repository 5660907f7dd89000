# SPDX-License-Identifier: Apache-2.0
"""Checks the names of requests and workers, and the types of arguments."""

from __future__ import annotations

from kvlink.errors import ConfigError

MAX_NAME_BYTES = 512


def check_kind(value: object, kind: type | tuple[type, ...], what: str, expected: str) -> None:
    """Raises ConfigError unless `value` is a `kind`. `expected` names that in words, with an article."""
    if not isinstance(value, kind):
        raise ConfigError(f"{what} must be {expected}, not {type(value).__name__}")


def check_name(name: object, what: str) -> None:
    """Raises ConfigError unless `name` can be a request or worker id. `what` says which of the two it is.

    The error quotes at most the start of the name.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{what} must be text, not {type(name).__name__}")
    try:
        num_bytes = len(name) if name.isascii() else len(name.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} {name!a:.40} has a lone surrogate at index {error.start}, which UTF-8 cannot hold"
        ) from None
    if not 0 < num_bytes <= MAX_NAME_BYTES:
        start = f", beginning with {name!r:.40}" if name else ""
        raise ConfigError(f"{what} has {num_bytes} bytes{start}; it must have 1 to {MAX_NAME_BYTES} bytes")
