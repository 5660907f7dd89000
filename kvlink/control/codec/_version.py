# SPDX-License-Identifier: Apache-2.0
"""Checks that peers speak the same protocol version. Their releases may differ.

Within a version, messages only gain fields that may be missing, and services gain methods that callers can do without.
"""

from __future__ import annotations

from kvlink.errors import ConfigError
from kvlink.types import PROTOCOL_VERSION

UNSAID = 1
"""The version of a peer whose message has no version field. All peers spoke this version before the field existed."""


def check_version(peer: str, version: int) -> None:
    """Raises ConfigError that names both versions if the peer's version differs from this process's."""
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{peer} speaks protocol version {version} and this process speaks {PROTOCOL_VERSION}; run releases of "
            "kvlink that have the same protocol version"
        )
