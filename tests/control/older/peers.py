# SPDX-License-Identifier: Apache-2.0
"""Recorded peers: what they said, and how they read what is said to them."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

from control.older.tape import Tape
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

_VARIES = ("timeout_s", "uptime_s", "claim_id")
RECORDED = sorted(Path(__file__).parent.glob("peer_*.json"))


class Older:
    """One recording."""

    def __init__(self, path: Path) -> None:
        recorded = json.loads(path.read_text())
        self.ticket = bytes.fromhex(recorded["ticket"])
        self.tapes = {name: Tape.load(recorded[name]) for name in ("coordinator", "agent")}
        self._pool = descriptor_pool.DescriptorPool()
        files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(recorded["descriptors"]))
        for file in files.file:  # protoc lists what is imported first
            self._pool.Add(file)

    def sees(self, method: str, what: str, blob: bytes) -> Message:
        """Its own fields of a message, without those that it does not know or that vary. Checks checksums."""
        service, _, name = method.removeprefix("/").partition("/")
        called = self._pool.FindServiceByName(service).FindMethodByName(name)
        seen = self._read(called.input_type if what == "sent" else called.output_type, blob)
        self._normalize(seen)
        return seen

    def _read(self, kind: Any, blob: bytes) -> Message:
        message = message_factory.GetMessageClass(kind).FromString(blob)
        message.DiscardUnknownFields()
        return message

    def _normalize(self, message: Any) -> None:
        if message.DESCRIPTOR.name == "SealedCard":
            assert zlib.crc32(message.card) == message.crc32
            card = self._read(self._pool.FindMessageTypeByName("kvlink.v1.WorkerCard"), message.card)
            message.card, message.crc32 = card.SerializeToString(deterministic=True), 0
        for field, value in message.ListFields():
            if field.name in _VARIES:
                message.ClearField(field.name)
            elif field.message_type is not None:
                for part in value if hasattr(value, "extend") else [value]:
                    self._normalize(part)

    def first(self, name: str, method: str, what: str) -> bytes:
        """The first message of a method that went that way."""
        for event in self.tapes[name].events:
            if event.method.endswith(f"/{method}") and event.what == what:
                return bytes.fromhex(event.blob)
        raise LookupError(method)
