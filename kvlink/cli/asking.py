# SPDX-License-Identifier: Apache-2.0
"""Which coordinator the commands that look at one mean, and what they write its figures as."""

from __future__ import annotations

from kvlink.config import WorkerConfig
from kvlink.control.coordinator import DEFAULT_PORT

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def address_of(given: str) -> str:
    """`given`, else KVLINK_COORDINATOR, else the default port here."""
    return given or WorkerConfig.from_env().coordinator or f"127.0.0.1:{DEFAULT_PORT}"


def bytes_text(number: float) -> str:
    """With a binary unit: "1.50 GiB"."""
    unit = 0
    while number >= 1024 and unit < len(_BYTES) - 1:
        number, unit = number / 1024, unit + 1
    digits = 0 if number >= 100 or not number else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {_BYTES[unit]}"


def seconds_text(seconds: float) -> str:
    """With the unit that fits: "4.2 ms"; a dash for 0, which means none."""
    if not seconds:
        return "-"
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"
