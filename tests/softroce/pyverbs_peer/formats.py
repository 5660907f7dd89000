# SPDX-License-Identifier: Apache-2.0
"""Packs what peers of the verbs transport exchange besides gRPC messages. Little-endian throughout.

    address  "kva2" | u32 count | count x (u32 bytes of name, name, u32 Ethernet?, u32 LID, u32 Mb/s, GID)
    hello    "kvh2" | u32 port of the owner, counted in its address | queue pair
    reply    "kvr2" | queue pair
    key      "kvk1" | u32 access | u64 base, bytes, bytes of a slice | u32 ports | ports x slices x u32 rkey
    access: 0 read, 1 read words, 2 write words
    queue pair: u32 number, first PSN, LID, MTU (1: 256 … 5: 4096), reads it starts, reads it answers, GID, ECE
    ECE      u32 vendor (0: none), options, mask
    GID      u32 16 | 16 bytes in network order

Both ends use the lesser of their MTUs, and of what one starts and the other answers. A reader's queue pair allows
remote writes: the owner makes sure that it lives by empty ones, and cuts it off by one of 8 bytes under key 0.

Slots of the lease table, which peers read, are of 64 bytes: u64 nonce, ready, reserved; slot 0 is its header. Peer
words, which peers write, are of 16 bytes a slot: u64 settled, reader. Before its first read a reader stores in
`reader` the number of its connection (u32) and the upper half of the nonce with its lowest bit set (u32); the highest
bit of the first says that it reads no more. It settles by storing the settle nonce, or that xor the number of readers
(1 … 255) when seats will stay empty.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

PROTOCOL_VERSION = 5
SLOT_BYTES = 64
NONCE, READY = 0, 8
"""Offsets in a slot."""
WORDS_BYTES = 16
SETTLED, READER = 0, 8
"""Offsets in the peer words of a slot."""
SETTLED_TOMBSTONE, EXPIRED_TOMBSTONE, ABORTED_TOMBSTONE = 1, 2, 3
"""These stand in place of the nonce of a lease that has ended."""
WITHDRAWN = 1 << 31
TABLE_MAGIC = int.from_bytes(b"KVLease2", "little")

_GID = struct.Struct("<I16s")
_QP = struct.Struct("<6I")
_ECE = struct.Struct("<3I")
_PORT = struct.Struct("<III")
_KEY = struct.Struct("<4sIQQQI")
_TICKET = struct.Struct("<4sHHI")
_TICKET_HEADER = struct.Struct("<QIIIBBHHHHHIH")
_SEAT = struct.Struct("<IQQ")


class QueuePair(NamedTuple):
    """One end, as the other end needs it."""

    number: int
    psn: int
    lid: int
    mtu: int
    reads_out: int
    reads_in: int
    gid: bytes

    def pack(self) -> bytes:
        return _QP.pack(*self[:6]) + _GID.pack(16, self.gid) + _ECE.pack(0, 0, 0)

    @classmethod
    def unpack(cls, blob: bytes) -> QueuePair:
        gid_bytes, gid = _GID.unpack_from(blob, _QP.size)
        assert (gid_bytes, len(blob)) == (16, _QP.size + _GID.size + _ECE.size)
        return cls(*_QP.unpack_from(blob), gid)


def announcement(connection_id: int, nonce: int) -> int:
    """Returns the word that a reader stores before it reads."""
    return (nonce >> 32 | 1) << 32 | connection_id


def pack_hello(owner_port: int, reader: QueuePair) -> bytes:
    return b"kvh2" + struct.pack("<I", owner_port) + reader.pack()


def unpack_hello(blob: bytes) -> tuple[int, QueuePair]:
    assert blob[:4] == b"kvh2"
    return int.from_bytes(blob[4:8], "little"), QueuePair.unpack(blob[8:])


def pack_reply(owner: QueuePair) -> bytes:
    return b"kvr2" + owner.pack()


def unpack_reply(blob: bytes) -> QueuePair:
    assert blob[:4] == b"kvr2"
    return QueuePair.unpack(blob[4:])


class Port(NamedTuple):
    """One way to an owner."""

    name: str
    is_ethernet: int
    lid: int
    mbps: int
    gid: bytes


def pack_address(ports: Sequence[Port]) -> bytes:
    blob = b"kva2" + struct.pack("<I", len(ports))
    for port in ports:
        name = port.name.encode()
        blob += struct.pack("<I", len(name)) + name
        blob += _PORT.pack(port.is_ethernet, port.lid, port.mbps) + _GID.pack(16, port.gid)
    return blob


def unpack_address(blob: bytes) -> list[Port]:
    magic, count = struct.unpack_from("<4sI", blob)
    assert magic == b"kva2"
    ports, at = [], 8
    for _ in range(count):
        (name_bytes,) = struct.unpack_from("<I", blob, at)
        at += 4 + name_bytes
        (_, gid) = _GID.unpack_from(blob, at + _PORT.size)
        ports.append(Port(blob[at - name_bytes : at].decode(), *_PORT.unpack_from(blob, at), gid))
        at += _PORT.size + _GID.size
    assert at == len(blob)
    return ports


class Key(NamedTuple):
    """A region that an owner registers. `rkeys` by port and slice."""

    writable: int
    base: int
    num_bytes: int
    slice_bytes: int
    rkeys: tuple[tuple[int, ...], ...]

    def pack(self) -> bytes:
        flat = [rkey for of_port in self.rkeys for rkey in of_port]
        return _KEY.pack(b"kvk1", *self[:4], len(self.rkeys)) + struct.pack(f"<{len(flat)}I", *flat)

    @classmethod
    def unpack(cls, blob: bytes) -> Key:
        magic, *fields, num_ports = _KEY.unpack_from(blob)
        assert magic == b"kvk1"
        flat = struct.unpack(f"<{(len(blob) - _KEY.size) // 4}I", blob[_KEY.size :])
        _, _, num_bytes, slice_bytes = fields
        num_slices = -(-num_bytes // slice_bytes)
        assert len(flat) == num_ports * num_slices
        return cls(*fields, tuple(flat[port * num_slices :][:num_slices] for port in range(num_ports)))


class Ticket(NamedTuple):
    """Holds what a reader needs of a ticket. `seats` are (slot, nonce, settle nonce)."""

    request_id: str
    worker_id: str
    epoch: int
    agent: str
    num_tokens: int
    ready: int
    seats: tuple[tuple[int, int, int], ...]
    block_ids: tuple[int, ...]

    def pack(self) -> str:
        """Text. `ready` counts blocks."""
        names = [name.encode() for name in (self.request_id, self.worker_id, self.agent)]
        num_blocks = len(self.block_ids)
        body = _TICKET_HEADER.pack(
            self.epoch, self.num_tokens, num_blocks, self.ready, 0, len(self.seats), 0, 1, *map(len, names), 60_000, 1
        )  # fmt: skip
        body += b"".join(_SEAT.pack(*seat) for seat in self.seats) + b"".join(names)
        body += struct.pack(f"<{num_blocks}I", *self.block_ids)
        blob = _TICKET.pack(b"KVT1", _TICKET_HEADER.size, PROTOCOL_VERSION, zlib.crc32(body)) + body
        return base64.urlsafe_b64encode(blob).decode()

    @classmethod
    def unpack(cls, text: str) -> Ticket:
        blob = base64.urlsafe_b64decode(text)
        magic, header_bytes, version, checksum = _TICKET.unpack_from(blob)
        body = blob[_TICKET.size :]
        assert (magic, version, checksum) == (b"KVT1", PROTOCOL_VERSION, zlib.crc32(body))
        epoch, num_tokens, num_blocks, ready, _, num_seats, _, _, *sizes, _, _ = _TICKET_HEADER.unpack_from(
            body
        )
        at = header_bytes + num_seats * _SEAT.size
        seats = tuple(_SEAT.iter_unpack(body[header_bytes:at]))
        names = []
        for size in sizes:
            names.append(body[at : at + size].decode())
            at += size
        block_ids = struct.unpack(f"<{num_blocks}I", body[at:])
        return cls(names[0], names[1], epoch, names[2], num_tokens, ready, seats, block_ids)
