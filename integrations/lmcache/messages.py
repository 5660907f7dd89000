# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between a reader and an owner over LMCache's handshake address.

- ask: JSON {"version", "reader", "page_bytes", "models": {model: 16 digits of its identity},
  "owners": [[model, rank, group, salt], …],
  "objects": [[offset, size] or [offset, size, index in "owners", hash], …]}
- answer: nothing for an ask without objects; "!" and why the ask is refused; or "=", the number of objects that are
  refused, their indices in the ask, and the ticket for all others, if there is any

Both are bounded and checked. `sockets` decides who is answered.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvlink.errors import ConfigError, TransferError
from kvlink.ticket import MAX_TICKET_BYTES, Ticket, check_request_id

from ..models import named_model
from .pages import MOST_OBJECTS, Name, Wanted

_VERSION = 3
_FIELDS = {"version", "reader", "page_bytes", "models", "owners", "objects"}
_REFUSED, _GRANTED = b"!", b"="
_MOST_HASH, _MOST_TEXT = 256, 1024

MOST_ASK_BYTES = 2 << 20
MOST_ANSWER_BYTES = MAX_TICKET_BYTES + 4 * MOST_OBJECTS + 16
_MOST_REFUSAL_BYTES = 500


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for a lease on objects. Without objects it only asks whether the two servers fit together."""

    reader: str
    page_bytes: int
    objects: Sequence[Wanted]
    models: Mapping[str, str] = field(default_factory=dict)
    """The identities of the models of the objects, as the reader's host has them. `to_bytes` adds them."""

    def to_bytes(self) -> bytes:
        """Serializes the message for `from_bytes`. Raises ConfigError if it is too long."""
        owners = {name[1:]: 0 for _, _, name in self.objects if name is not None}
        owners = {owner: number for number, owner in enumerate(owners)}
        body = {
            "version": _VERSION,
            "reader": self.reader,
            "page_bytes": self.page_bytes,
            "models": {model: named_model(model) for model in {owner[0] for owner in owners}},
            "owners": list(owners),
            "objects": [
                (offset, size) if name is None else (offset, size, owners[name[1:]], name[0])
                for offset, size, name in self.objects
            ],
        }
        message = json.dumps(body).encode()
        if len(message) > MOST_ASK_BYTES:
            raise ConfigError(
                f"the keys of {len(self.objects)} objects take {len(message)} bytes, more than an ask has; shorten "
                "the name of the model"
            )
        return message

    @classmethod
    def from_bytes(cls, blob: bytes) -> Ask:
        """Parses an untrusted message. Raises ConfigError."""
        try:
            if len(blob) > MOST_ASK_BYTES:
                raise ValueError(f"{len(blob)} bytes")
            body = json.loads(blob)
            if body["version"] != _VERSION:
                raise ValueError(
                    f"version {body['version']!r:.20} of the message, this process has {_VERSION}; install the same "
                    "version of kvlink on all servers"
                )
            if unknown := body.keys() - _FIELDS:
                raise ValueError(f"unknown fields {sorted(unknown)!a:.80}")
            owners = [_owner(each) for each in _listed(body["owners"])]
            objects = [_wanted(each, owners) for each in _listed(body["objects"])]
            models = {
                _text(model, _MOST_TEXT): _text(digits, _MOST_HASH)
                for model, digits in _table(body["models"]).items()
            }
            reader, page_bytes = body["reader"], _number(body["page_bytes"])
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"not a message of kvlink's transfer channel: {error!a:.200}") from None
        check_request_id(reader)
        return cls(reader, page_bytes, objects, models)


@dataclass(frozen=True, slots=True)
class Answer:
    """The ticket for the objects of an ask that are not refused. Nothing is granted without a ticket."""

    refused: frozenset[int]
    ticket: Ticket | None

    def to_bytes(self) -> bytes:
        """Serializes the answer for `from_bytes`."""
        count = len(self.refused)
        head = struct.pack(f"<{count + 1}I", count, *sorted(self.refused))
        return _GRANTED + head + (b"" if self.ticket is None else self.ticket.to_bytes())

    @classmethod
    def from_bytes(cls, blob: bytes, owner: str, num_objects: int) -> Answer:
        """Parses an owner's answer to an ask for so many objects. Raises TransferError, ConfigError."""
        if blob.startswith(_REFUSED):
            raise TransferError(
                f"{owner} refused: {blob[1:_MOST_REFUSAL_BYTES].decode(errors='backslashreplace')!a}"
            )
        if not blob and not num_objects:
            return cls(frozenset(), None)
        try:
            if blob[:1] != _GRANTED:
                raise ValueError("it begins with no known byte")
            (count,) = struct.unpack_from("<I", blob, 1)
            if count > num_objects:
                raise ValueError(f"{count} of {num_objects} objects refused")
            refused = frozenset(struct.unpack_from(f"<{count}I", blob, 5))
            rest = blob[5 + 4 * count :]
            if len(refused) != count or any(index >= num_objects for index in refused):
                raise ValueError("the refused objects are not objects of the ask")
            if bool(rest) != (count < num_objects):
                raise ValueError("a ticket for no object, or none")
        except (ValueError, struct.error) as error:
            raise ConfigError(f"{owner} answered with what is no answer of kvlink: {error}") from None
        return cls(refused, Ticket.from_bytes(rest) if rest else None)


def refusal(error: Exception) -> bytes:
    """Returns the answer that `Answer.from_bytes` raises at the reader."""
    text = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
    return _REFUSED + text[:_MOST_REFUSAL_BYTES]


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_OBJECTS:
        raise ValueError(f"no list of at most {MOST_OBJECTS}")
    return value


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > MOST_OBJECTS:
        raise ValueError(f"no object of at most {MOST_OBJECTS}")
    return value


def _owner(value: Any) -> tuple[str, int, int, str]:
    model, rank, group, salt = value
    return _text(model, _MOST_TEXT), _number(rank), _number(group), _text(salt, _MOST_TEXT)


def _wanted(value: Any, owners: list[tuple[str, int, int, str]]) -> Wanted:
    if not isinstance(value, list) or len(value) not in (2, 4):
        raise ValueError("an object has an offset, a size, and a key")
    offset, size = map(_number, value[:2])
    if len(value) == 2:
        return Wanted(offset, size)
    index = _number(value[2])
    if index < 0:
        raise ValueError("an index is negative")
    digest = _text(value[3], _MOST_HASH)
    bytes.fromhex(digest)
    name: Name = (digest, *owners[index])
    return Wanted(offset, size, name)


def _number(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise ValueError("a number is none, or has more than 64 bits")
    return value


def _text(value: Any, most: int) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"a text is none, or has more than {most} characters")
    return value
