# SPDX-License-Identifier: Apache-2.0
"""Parses the options that select NIC ports and the ways from a NIC to GPU memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from kvlink.errors import ConfigError


class Way(Enum):
    """Ways from a NIC to GPU memory, best first: directly (DMA_BUF and PEERMEM) or through host memory (BOUNCE)."""

    DMA_BUF = "dma-buf"
    PEERMEM = "peermem"
    BOUNCE = "bounce"


def parse_ways(spec: str) -> tuple[Way, ...]:
    """Parses the text of KVLINK_GPUDIRECT. An empty text selects all ways. Raises ConfigError for an unknown way."""
    names = [name.strip() for name in spec.split(",") if name.strip()]
    try:
        return tuple(Way(name) for name in dict.fromkeys(names)) or tuple(Way)
    except ValueError:
        known = ", ".join(way.value for way in Way)
        raise ConfigError(f"KVLINK_GPUDIRECT={spec!r} must list some of {known}, best first") from None


@dataclass(frozen=True, slots=True)
class NicNames:
    """The parsed form of KVLINK_NICS. `excludes` says whether `ports` are excluded; no ports mean no restriction."""

    excludes: bool
    ports: tuple[tuple[str, int | None], ...]
    """Device and port number. None stands for every port of the device."""


def parse_nics(spec: str) -> NicNames:
    """Parses "mlx5_0:1,mlx5_1" or "^mlx5_2" without a check that the ports exist. Raises ConfigError."""
    excludes = spec.strip().startswith("^")
    listed = spec.strip().removeprefix("^")
    parts = [part.strip() for part in listed.split(",")] if listed or excludes else []
    matches = [re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,2}))?", part, re.ASCII) for part in parts]
    if not all(matches):
        raise ConfigError(
            f"KVLINK_NICS={spec!r} is no list of NICs; write device or device:port separated by commas, as in "
            "mlx5_0:1,mlx5_1, or ^ before the first to use all others (`kvlink topology` lists them)"
        )
    ports = [(match[1], int(match[2]) if match[2] else None) for match in matches if match]
    return NicNames(excludes, tuple(dict.fromkeys(ports)))
