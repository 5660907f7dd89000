# SPDX-License-Identifier: Apache-2.0
"""Splits a stream of server-sent events, as servers with OpenAI's API send them, and writes such events."""

from __future__ import annotations

import re

from .bodies import MOST_PARSED, Body, encoded, object_in

DONE = b"data: [DONE]\n\n"
_DATA = b"data:"
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
_LONGEST_END = 4


class ServerEvents:
    """Collects the pieces of one stream until they form whole events, which keep their bytes."""

    def __init__(self) -> None:
        self.rest = bytearray()
        """The bytes that are no whole event yet."""

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the events that this piece completes, with their ends. One that is too long comes in parts."""
        searched = max(len(self.rest) - _LONGEST_END, 0)
        self.rest += piece
        events, begin = [], 0
        if _END.search(self.rest, searched):
            whole = bytes(self.rest)
            for end in _END.finditer(whole, searched):
                events.append(whole[begin : end.end()])
                begin = end.end()
        if len(self.rest) - begin > MOST_PARSED:
            events.append(bytes(self.rest[begin:]))
            begin = len(self.rest)
        del self.rest[:begin]
        return events


def value_of(event: bytes) -> Body | None:
    """Returns the object in an event of one line, or None for anything else."""
    lines = event.strip().splitlines()
    return object_in(lines[0][len(_DATA) :]) if len(lines) == 1 and lines[0].startswith(_DATA) else None


def is_done(event: bytes) -> bool:
    """Returns whether an event ends the answer."""
    return event.strip().removeprefix(_DATA).strip() == b"[DONE]"


def is_comment(event: bytes) -> bool:
    """Returns whether an event says nothing, as those that keep connections open."""
    return all(line.startswith(b":") for line in event.splitlines() if line.strip())


def event_of(value: Body) -> bytes:
    """Returns the bytes of an event with this object, with its end."""
    return b"data: " + encoded(value) + b"\n\n"
