# SPDX-License-Identifier: Apache-2.0
"""Reads what the kernel says under /proc and /sys. `root` is / or a copy of it; an absent file reads as ""."""

from __future__ import annotations

from pathlib import Path


def read(root: Path, path: str) -> str:
    """The stripped text of one file, "" when it is absent or unreadable."""
    try:
        return (root / path).read_text(errors="replace").strip()
    except OSError:
        return ""


def read_int(root: Path, path: str) -> int | None:
    """The file's first word as a number; None when absent or no number."""
    try:
        return int(read(root, path).split()[0])
    except (IndexError, ValueError):
        return None


def read_field(root: Path, path: str, name: str) -> str:
    """The value of the first line "name : value" of a file such as /proc/cpuinfo."""
    for line in read(root, path).splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def parse_list(text: str) -> tuple[int, ...]:
    """The kernel's list format: "0-2,8" is (0, 1, 2, 8)."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def parse_size(text: str) -> int:
    """Bytes of "32K", "16384 kB", "2M" or "17"; 0 for ""."""
    number = text.strip().rstrip("bB ")
    if not number:
        return 0
    shift = {"K": 10, "M": 20, "G": 30}.get(number[-1].upper(), 0)
    return int(number.rstrip("kKmMgG ")) << shift
