# SPDX-License-Identifier: Apache-2.0
"""Which peers understand each other: those of one protocol version, whatever release each is of.

Within a version, messages only gain fields that may be missing, and services gain methods that callers do without.
"""

from __future__ import annotations

from kvlink.errors import ConfigError
from kvlink.types import PROTOCOL_VERSION

UNSAID = 1
"""Of a peer whose message does not say it: when none did, all spoke this one."""


def check_version(who: str, version: int) -> None:
    """Raises ConfigError, naming both versions."""
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"{who} speaks protocol version {version}, this process {PROTOCOL_VERSION}; run releases of kvlink "
            "that have one protocol version"
        )
