# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between a reader and an owner over LMCache's handshake address.

- ask: JSON {"version", "reader", "page_bytes", "objects": [[offset, size], …]}, with "mark" under KVLINK_TICKET_KEYS
- answer: the bytes of a ticket for these objects, nothing for an ask without objects, or "!" and why it is refused

An ask is bounded and checked. With keys, only workers of the same tenant are answered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvlink.control.security.tickets import TicketKeys
from kvlink.errors import AccessDenied, ConfigError, KVLinkError, TransferError
from kvlink.ticket import Ticket, check_request_id

from .pages import Object

_VERSION = 1
_REFUSED = b"!"
_MOST_BYTES = 16 << 20
_MARK = "mark"


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for a lease on objects. Without objects it only asks whether the two servers fit together."""

    reader: str
    page_bytes: int
    objects: Sequence[Object]

    def to_bytes(self, keys: TicketKeys | None) -> bytes:
        """Serializes the message for `from_bytes`, with the mark of this tenant if there are keys."""
        body = {
            "version": _VERSION,
            "reader": self.reader,
            "page_bytes": self.page_bytes,
            "objects": list(self.objects),
        }
        return json.dumps(body | {_MARK: keys.mark(_marked(body))} if keys else body).encode()

    @classmethod
    def from_bytes(cls, blob: bytes, keys: TicketKeys | None) -> Ask:
        """Parses an untrusted message. Raises ConfigError, and AccessDenied without a mark of this tenant."""
        try:
            if len(blob) > _MOST_BYTES:
                raise ValueError(f"{len(blob)} bytes")
            body = json.loads(blob)
            mark = body.pop(_MARK, "")
            if body["version"] != _VERSION:
                raise ValueError(
                    f"version {body['version']!r:.20} of the message, this process has {_VERSION}"
                )
            reader, page_bytes = body["reader"], body["page_bytes"]
            objects = [(offset, size) for offset, size in body["objects"]]
            if not all(type(number) is int for pair in [(page_bytes, 0), *objects] for number in pair):
                raise ValueError("a number is none")
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"not a message of kvlink's transfer channel: {error!r:.200}") from None
        if keys and not (isinstance(mark, str) and keys.marked(_marked(body), mark)):
            raise AccessDenied(
                f"the message is not marked by {keys!r}: LMCache's servers need the same KVLINK_TICKET_KEYS"
            )
        check_request_id(reader)
        return cls(reader, page_bytes, objects)


def refusal(error: KVLinkError) -> bytes:
    """Returns the answer that `ticket_in` raises at the reader."""
    return _REFUSED + f"{type(error).__name__}: {error}".encode()


def ticket_in(answer: bytes, owner: str) -> Ticket | None:
    """Returns the ticket of an answer, or None if nothing was asked for. Raises TransferError, ConfigError."""
    if answer.startswith(_REFUSED):
        raise TransferError(f"{owner} refused: {answer[1:500].decode(errors='replace')}")
    return Ticket.from_bytes(answer) if answer else None


def _marked(body: object) -> bytes:
    return json.dumps(body, sort_keys=True).encode()
