# SPDX-License-Identifier: Apache-2.0
"""Formats numbers for people, with a few digits and the unit that fits."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def bytes_text(number: float) -> str:
    """Formats a number of bytes with a binary unit: "1.50 GiB"."""
    unit = 0
    while number >= 1024 and unit < len(_BYTES) - 1:
        number, unit = number / 1024, unit + 1
    digits = 0 if number >= 100 or not number else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {_BYTES[unit]}"


def size_text(num_bytes: int) -> str:
    """Formats like `bytes_text`, but omits digits after the point that are zero: "16 KiB"."""
    for unit, name in enumerate(_BYTES):
        whole, rest = divmod(num_bytes, 1 << 10 * unit)
        if not rest and whole < 1024:
            return f"{whole} {name}"
    return bytes_text(num_bytes)


def seconds_text(seconds: float) -> str:
    """Formats a duration with the unit that fits: "4.2 ms". Returns a dash for 0, which means no value."""
    if not seconds:
        return "-"
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """Formats an age: "42 s", "3.5 h", "12 d"."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{max(seconds, 0):.0f} s"
