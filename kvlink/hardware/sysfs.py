# SPDX-License-Identifier: Apache-2.0
"""Reads files under /proc and /sys. `root` is / or a copy of it, and an absent file reads as ""."""

from __future__ import annotations

import os
import re
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path


def read(root: Path, path: str) -> str:
    """Returns the stripped text of one file, or "" if it is absent or unreadable."""
    try:
        return (root / path).read_text(errors="replace").strip()
    except OSError:
        return ""


def read_int(root: Path, path: str) -> int | None:
    """Returns the first word of a file as a number (decimal or 0x…), or None if it is absent or not a number."""
    word = (read(root, path).split() or [""])[0]
    try:
        return int(word, 16 if word.startswith("0x") else 10)
    except ValueError:
        return None


def read_field(root: Path, path: str, name: str) -> str:
    """Returns the value of the first line "name : value" of a file such as /proc/cpuinfo."""
    for line in read(root, path).splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""


def names(root: Path, path: str) -> list[str]:
    """Returns the entries of a directory in human order, mlx5_2 before mlx5_10, or none if it is absent."""
    return sorted(_entries(root, path), key=human_order)


def human_order(name: str) -> list[tuple[int, str]]:
    """Returns a sort key that compares the numbers within names as numbers."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def numbered(root: Path, path: str, prefix: str = "", suffix: str = "") -> list[int]:
    """Returns, in ascending order, the numbers of the entries whose name is prefix, number and suffix."""
    pattern = re.compile(re.escape(prefix) + r"(\d+)" + re.escape(suffix))
    return sorted(int(match[1]) for name in _entries(root, path) if (match := pattern.fullmatch(name)))


def _entries(root: Path, path: str) -> list[str]:
    try:
        return [entry.name for entry in (root / path).iterdir()]
    except OSError:
        return []


def parse_list(text: str) -> tuple[int, ...]:
    """Parses the kernel's list format. The text "0-2,8" gives (0, 1, 2, 8)."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def leading_number(text: str) -> float:
    """Returns the number that a text begins with: 32.0 for "32.0 GT/s PCIe", and 0 for "Unknown"."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0


def parse_size(text: str) -> int:
    """Returns the bytes of a text such as "32K", "16384 kB", "2M" or "17", and 0 for ""."""
    number = text.strip().rstrip("bB ")
    if not number:
        return 0
    shift = {"K": 10, "M": 20, "G": 30}.get(number[-1].upper(), 0)
    return int(number.rstrip("kKmMgG ")) << shift


def why_closed(path: Path) -> str:
    """Returns why a file cannot be opened, or "". Opening it also detects a container's device filter."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def local_addresses(root: Path) -> frozenset[IPv4Address | IPv6Address]:
    """Returns the IP addresses of this network namespace, or none where the kernel does not show them."""
    found: set[IPv4Address | IPv6Address] = set()
    address = ""
    for line in read(root, "proc/net/fib_trie").splitlines():
        word = line.strip().removeprefix("|-- ")
        if word.startswith("/32 host LOCAL") and address:
            found.add(IPv4Address(address))
        address = word if re.fullmatch(r"\d+(\.\d+){3}", word) else ""
    for line in read(root, "proc/net/if_inet6").splitlines():
        if re.match(r"[0-9a-f]{32} ", line):
            found.add(IPv6Address(bytes.fromhex(line[:32])))
    return frozenset(found)
