# SPDX-License-Identifier: Apache-2.0
"""Identifies a span of a trace, in the format of https://www.w3.org/TR/trace-context/. Pure.

The values come from foreign headers and tickets, and only decide where spans are shown. A malformed one belongs to no
trace and is never an error.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = "traceparent"
"""The HTTP header, and the key in gRPC's metadata."""
NUM_BYTES = 25

# Version 00 ends after the flags, later versions may continue. Version ff is invalid.
_TEXT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_MAX_CHARACTERS = 512


class TraceParent(NamedTuple):
    """A span as seen from its children in other processes. Bit 0 of `flags` says that it is recorded."""

    trace_id: int
    span_id: int
    flags: int

    def __str__(self) -> str:
        """Returns the value of the header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"

    def to_bytes(self) -> bytes:
        """Returns NUM_BYTES bytes in the order of the header."""
        return self.trace_id.to_bytes(16, "big") + self.span_id.to_bytes(8, "big") + bytes([self.flags])

    @classmethod
    def parse(cls, text: str) -> TraceParent | None:
        """Parses a header's value. Returns None for anything malformed."""
        match = _TEXT.fullmatch(text.strip()) if len(text) <= _MAX_CHARACTERS else None
        if match is None or (match[1] == "00" and match[5]):
            return None
        return _valid(int(match[2], 16), int(match[3], 16), int(match[4], 16))

    @classmethod
    def from_bytes(cls, blob: bytes) -> TraceParent | None:
        """Inverts `to_bytes`. Returns None for anything that it cannot have written, and for zeros."""
        if len(blob) != NUM_BYTES:
            return None
        return _valid(int.from_bytes(blob[:16], "big"), int.from_bytes(blob[16:24], "big"), blob[24])


def _valid(trace_id: int, span_id: int, flags: int) -> TraceParent | None:
    return TraceParent(trace_id, span_id, flags) if trace_id and span_id else None
