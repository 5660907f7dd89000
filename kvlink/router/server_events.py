# SPDX-License-Identifier: Apache-2.0
"""Splits a stream of server-sent events, as servers with OpenAI's API send them, and writes such events."""

from __future__ import annotations

import json
from typing import Any

from kvlink.router.bodies import object_in

DONE = b"data: [DONE]"
MOST_BYTES = 64 << 20
"""The largest event. The first one of an answer may contain the ids of a whole prompt."""
_END = b"\n\n"
_DATA = b"data: "


class EventTooLong(Exception):
    """A server sent more than MOST_BYTES without an end of an event."""


class ServerEvents:
    """Collects the pieces of one stream until they form whole events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the events that this piece completes, without their ends. Raises EventTooLong."""
        searched = max(len(self._rest) - 1, 0)
        self._rest += piece
        if self._rest.find(_END, searched) < 0:
            if len(self._rest) > MOST_BYTES:
                raise EventTooLong(f"an event of more than {MOST_BYTES >> 20} MiB")
            return []
        *events, rest = bytes(self._rest).split(_END)
        self._rest = bytearray(rest)
        return [event for event in events if event]


def value_of(event: bytes) -> dict[str, Any] | None:
    """Returns the object in an event, or None for DONE, a comment, and anything else."""
    return object_in(event[len(_DATA) :]) if event.startswith(_DATA) else None


def event_of(value: dict[str, Any]) -> bytes:
    """Returns the bytes of an event with this object, with its end."""
    return _DATA + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + _END


def ended(event: bytes) -> bytes:
    """Returns the bytes of an event that is passed on unchanged."""
    return event + _END
