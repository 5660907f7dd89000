# SPDX-License-Identifier: Apache-2.0
"""Counts the entries of a message in its bytes, because protobuf would build them all before they could be refused.

An empty entry takes two bytes on the wire and a hundred in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvlink.errors import ConfigError

HARMLESS_BYTES = 64 << 10
"""Messages up to this size are not scanned, because whatever they hold takes little memory."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MORE = bytes(range(0x80, 0x100))
"""All byte values that continue a varint."""


class Repeated(NamedTuple):
    """Bounds a repeated field to `most` entries. Fields with the same `name` are counted together."""

    name: str
    most: int
    inside: Bounds | None = None
    packed: bool = False
    """The field holds packed numbers: one entry on the wire may hold many."""
    together: bool = False
    """The bounds inside are those of all entries together, not of each."""

    @property
    def is_plain(self) -> bool:
        """Returns whether an entry need not be looked into."""
        return self.inside is None and not self.packed


class Single(NamedTuple):
    """Bounds the fields of a nested message. If it occurs more than once, protobuf merges it, so counts add up."""

    inside: Bounds


Bounds = Mapping[int, "Repeated | Single"]
"""Maps field numbers to bounds. Other fields are skipped."""


def check(blob: bytes, bounds: Bounds, most_bytes: int | None = None) -> None:
    """Raises ConfigError if a field has too many entries or the message is truncated.

    `most_bytes` bounds the size of a message with several entries.
    """
    if len(blob) <= HARMLESS_BYTES:
        return
    entries = count(blob, bounds)
    if most_bytes is not None and entries > 1 and len(blob) > most_bytes:
        raise ConfigError(
            f"its {entries} entries have {len(blob)} bytes, and at most {most_bytes} are accepted"
        )


def count(blob: bytes, bounds: Bounds) -> int:
    """Checks a message of any size like `check`. Returns the total number of entries."""
    counts: dict[tuple[object, ...], int] = {}
    _scan(memoryview(blob), bounds, counts, ())
    return sum(counts.values())


def _scan(
    blob: memoryview, bounds: Bounds, counts: dict[tuple[object, ...], int], path: tuple[object, ...]
) -> None:
    at, end = 0, len(blob)
    while at < end:
        tag = blob[at]
        bound = bounds.get(tag >> 3)
        if (
            bound is not None
            and tag & 7 == _BYTES
            and tag < 0x80
            and isinstance(bound, Repeated)
            and bound.is_plain
        ):
            at = _scan_run(blob, at, tag, bound, counts, (*path, bound.name))
            continue
        at += 1
        if tag >= 0x80:
            tag, at = _varint(blob, at - 1)
        kind, start = tag & 7, at
        if kind == _BYTES:
            size, start = _varint(blob, at)
            at = start + size
        elif kind == _VARINT:
            _, at = _varint(blob, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ConfigError(f"it has a field of wire type {kind}, which kvlink does not use")
        if at > end:
            raise ConfigError("it is truncated")
        bound = bounds.get(tag >> 3)
        if bound is None:
            continue
        if isinstance(bound, Single):
            if kind == _BYTES:
                _scan(blob[start:at], bound.inside, counts, (*path, tag >> 3))
        else:
            _count(blob[start:at], bound, kind, counts, (*path, bound.name))


def _scan_run(
    blob: memoryview,
    at: int,
    tag: int,
    bound: Repeated,
    counts: dict[tuple[object, ...], int],
    path: tuple[object, ...],
) -> int:
    """Counts fields of one tag that follow each other, most of which are short. Returns the position behind them."""
    number, end = counts.get(path, 0), len(blob)
    try:
        while at < end and blob[at] == tag:
            if (size := blob[at + 1]) < 0x80:
                at += 2 + size
            else:
                size, at = _varint(blob, at + 1)
                at += size
            number += 1
            if number > bound.most:
                raise ConfigError(
                    f"the number of {bound.name} exceeds {bound.most}, the maximum that is accepted"
                )
    except IndexError:
        raise ConfigError("it is truncated") from None
    if at > end:
        raise ConfigError("it is truncated")
    counts[path] = number
    return at


def _count(
    entry: memoryview,
    bound: Repeated,
    kind: int,
    counts: dict[tuple[object, ...], int],
    path: tuple[object, ...],
) -> None:
    several = bound.packed and kind == _BYTES
    counts[path] = counts.get(path, 0) + (len(bytes(entry).translate(None, _MORE)) if several else 1)
    if counts[path] > bound.most:
        raise ConfigError(f"the number of {bound.name} exceeds {bound.most}, the maximum that is accepted")
    if bound.inside is not None and kind == _BYTES:
        _scan(entry, bound.inside, *((counts, path) if bound.together else ({}, ())))


def _varint(blob: memoryview, at: int) -> tuple[int, int]:
    """Returns the number that starts at `at`, and the position behind it."""
    value = shift = 0
    try:
        if (byte := blob[at]) < 0x80:
            return byte, at + 1
        while True:
            byte = blob[at]
            at += 1
            if byte < 0x80:
                return value | byte << shift, at
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ConfigError("it has a number of more than 64 bits")
    except IndexError:
        raise ConfigError("it is truncated") from None
