# SPDX-License-Identifier: Apache-2.0
"""How many entries a message has, counted in its bytes: protobuf would build them all before anybody could refuse.

An empty entry takes two bytes on the wire and a hundred in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvlink.errors import ConfigError

HARMLESS_BYTES = 64 << 10
"""Whatever a message of this size holds, it is little: that the many small messages are not looked through."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MORE = bytes(range(0x80, 0x100))
"""Bytes of a varint that has more."""


class Repeated(NamedTuple):
    """A field of which there are at most so many. Fields with the same `name` are counted together."""

    name: str
    most: int
    inside: Bounds | None = None
    packed: bool = False
    """Numbers: one entry on the wire may hold many."""


class Single(NamedTuple):
    """A message that is there once. Given more often, its parts add up, and are counted so."""

    inside: Bounds


Bounds = Mapping[int, "Repeated | Single"]
"""By field number; other fields are passed over."""


def check(blob: bytes, bounds: Bounds, most_bytes: int | None = None) -> None:
    """Raises ConfigError at the first entry that is one too many, and for a message that is cut off.

    `most_bytes`: of a message with several entries.
    """
    if len(blob) <= HARMLESS_BYTES:
        return
    entries = count(blob, bounds)
    if most_bytes is not None and entries > 1 and len(blob) > most_bytes:
        raise ConfigError(f"its {entries} entries have {len(blob)} bytes, at most {most_bytes} are taken")


def count(blob: bytes, bounds: Bounds) -> int:
    """As `check`, for a message of any size. Returns how many entries there are in all."""
    counts: dict[tuple[object, ...], int] = {}
    _scan(memoryview(blob), bounds, counts, ())
    return sum(counts.values())


def _scan(
    blob: memoryview, bounds: Bounds, counts: dict[tuple[object, ...], int], path: tuple[object, ...]
) -> None:
    at, end = 0, len(blob)
    while at < end:
        tag = blob[at]
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
            raise ConfigError("it is cut off")
        bound = bounds.get(tag >> 3)
        if bound is None:
            continue
        if isinstance(bound, Single):
            if kind == _BYTES:
                _scan(blob[start:at], bound.inside, counts, (*path, tag >> 3))
        else:
            _count(blob[start:at], bound, kind, counts, (*path, bound.name))


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
        raise ConfigError(f"number of {bound.name} is over {bound.most}, which is the most that is taken")
    if bound.inside is not None and kind == _BYTES:
        _scan(entry, bound.inside, {}, ())


def _varint(blob: memoryview, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
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
        raise ConfigError("it is cut off") from None
