# SPDX-License-Identifier: Apache-2.0
"""Parses the options that select NIC ports and the ways from a NIC to GPU memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from kvlink.errors import ConfigError

_PCI_ADDRESS = re.compile(r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


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
    """One list of KVLINK_NICS. `excludes` says whether `ports` are excluded; no ports mean no restriction."""

    excludes: bool = False
    ports: tuple[tuple[str, int | None], ...] = ()
    """Device and port number. None stands for every port of the device."""


def parse_nics(spec: str) -> dict[str, NicNames]:
    """Parses lists such as "mlx5_0:1,mlx5_1" or "^mlx5_2", separated by ";", each for one GPU if ADDRESS= precedes it.

    Returns the lists by the PCI address of the GPU, with "" for all others, without a check that the ports exist.
    Raises ConfigError.
    """
    found: dict[str, NicNames] = {}
    for entry in spec.split(";") if ";" in spec or "=" in spec else [spec]:
        gpu, equals, listed = entry.rpartition("=")
        gpu = gpu.strip()
        if gpu in found or bool(equals) != bool(re.fullmatch(_PCI_ADDRESS, gpu)):
            raise ConfigError(
                f"KVLINK_NICS={spec!r} must have one list for each GPU, as in 0000:1b:00.0=mlx5_0;0000:43:00.0=mlx5_1 "
                "(`kvlink topology` shows the addresses)"
            )
        found[gpu] = _parse_names(listed, spec)
    return found


def _parse_names(listed: str, spec: str) -> NicNames:
    excludes = listed.strip().startswith("^")
    names = listed.strip().removeprefix("^")
    parts = [part.strip() for part in names.split(",")] if names or excludes or spec != listed else []
    matches = [re.fullmatch(r"([\w.-]+)(?::([1-9]\d{0,2}))?", part, re.ASCII) for part in parts]
    if not all(matches):
        raise ConfigError(
            f"KVLINK_NICS={spec!r} is no list of NICs; write device or device:port separated by commas, as in "
            "mlx5_0:1,mlx5_1, or ^ before the first to use all others (`kvlink topology` lists them)"
        )
    ports = [(match[1], int(match[2]) if match[2] else None) for match in matches if match]
    return NicNames(excludes, tuple(dict.fromkeys(ports)))
