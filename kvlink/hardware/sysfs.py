# SPDX-License-Identifier: Apache-2.0
"""Reads what the kernel says under /proc and /sys. `root` is / or a copy of it; an absent file reads as ""."""

from __future__ import annotations

import re
from pathlib import Path


def read(root: Path, path: str) -> str:
    """The stripped text of one file, "" when it is absent or unreadable."""
    try:
        return (root / path).read_text(errors="replace").strip()
    except OSError:
        return ""


def read_int(root: Path, path: str) -> int | None:
    """The file's first word as a number, decimal or 0x…; None when absent or no number."""
    word = (read(root, path).split() or [""])[0]
    try:
        return int(word, 16 if word.startswith("0x") else 10)
    except ValueError:
        return None


def read_field(root: Path, path: str, name: str) -> str:
    """The value of the first line "name : value" of a file such as /proc/cpuinfo."""
    for line in read(root, path).splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def names(root: Path, path: str) -> list[str]:
    """The entries of a folder in human order, mlx5_2 before mlx5_10; none when it is absent."""
    return sorted(_entries(root, path), key=human_order)


def human_order(name: str) -> list[tuple[int, str]]:
    """A sort key that compares the numbers within names as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def numbered(root: Path, path: str, prefix: str = "", suffix: str = "") -> list[int]:
    """The numbers of the entries named prefix, number, suffix; ascending."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
    return sorted(int(match[1]) for name in _entries(root, path) if (match := pattern.fullmatch(name)))


def _entries(root: Path, path: str) -> list[str]:
    try:
        return [entry.name for entry in (root / path).iterdir()]
    except OSError:
        return []


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
