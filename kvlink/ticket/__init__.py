# SPDX-License-Identifier: Apache-2.0
"""Defines the ticket, which a decode worker needs to pull one request from one prefill worker.

It travels in the router's message (as text) or through the coordinator (as bytes). Wire form, little-endian:

    magic "KVT1" | u16 header bytes | u16 version | u32 crc32 of everything after this field
    u64 epoch | u32 num_tokens | u32 num_blocks | u32 ready | u8 ready_unit | u8 num_seats | u16 rank | u16 num_ranks
    u16 bytes of request_id | u16 bytes of worker_id | u16 bytes of agent | u32 time to live in ms | u16 num_groups
    [16 bytes of signature, zeros for none, [16 bytes of trace id | 8 of span id | 1 of flags, zeros for none,
        [u32 num_digests | u8 bytes of each, zeros for none, [u64 model]]]]
        (a reader skips the parts of a longer header that it does not know: signature, trace, or newer fields)
    num_seats x (u32 slot, u64 nonce, u64 settle nonce, 1 for a shared seat) | request_id | worker_id | agent
    num_blocks x u32 | [num_groups x (u32 blocks, u32 tokens) of each cache group, if there are several] | [digests]
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvlink.errors import ConfigError
from kvlink.layout.groups import MAX_GROUPS
from kvlink.runtime.names import MAX_NAME_BYTES, check_kind, check_name
from kvlink.ticket.prefix_digests import HEADER_BYTES, MAX_DIGEST_BYTES, PrefixDigests
from kvlink.tracing import traceparent
from kvlink.tracing.traceparent import TraceParent
from kvlink.types import PROTOCOL_VERSION, ReadyUnit

_PREFIX = struct.Struct("<4sHHI")
_HEADER = struct.Struct("<QIIIBBHHHHHIH")
_SEAT = struct.Struct("<IQQ")
_GROUP = struct.Struct("<II")
_MODEL = struct.Struct("<Q")
_MAGIC, _UNSIGNED = b"KVT1", b""

MAX_BLOCKS = 1 << 20
SMALLEST_NONCE = 256
"""Slots without a lease hold smaller values. Slot 0 is the header of the lease table."""
SHARED_SEAT = 1
"""In place of a settle nonce: the one seat of a soft lease, under which any number of readers read."""
MAX_SLOTS = 1 << 20
"""The largest number of slots of a lease table, without its header."""
SIGNATURE_BYTES = 16
_SIGNED_BYTES = _HEADER.size + SIGNATURE_BYTES
_TRACED_BYTES = _SIGNED_BYTES + traceparent.NUM_BYTES
_DIGESTED_BYTES = _TRACED_BYTES + HEADER_BYTES
MAX_TICKET_BYTES = (
    _PREFIX.size + 4096 + 255 * _SEAT.size + 3 * MAX_NAME_BYTES + 4 * MAX_BLOCKS + 8 * MAX_GROUPS
    + MAX_DIGEST_BYTES
)  # fmt: skip

_TEXT_PREFIX = "S1ZUM"
"""The start of the text of every ticket, which is its magic in base64."""
_AROUND = " \t\r\n\"'"
"""Characters that copying may add around a text."""
_WITHIN = re.compile(_TEXT_PREFIX + r"[\w-]{90}", re.ASCII)
"""Matches the shortest ticket inside of another text."""


def check_request_id(name: object) -> None:
    """Raises ConfigError as `check_name` does, and for a text that is or contains a ticket.

    Logs and errors show request ids, and a ticket is secret.
    """
    check_name(name, "request id")
    text = str(name)
    if _TEXT_PREFIX in text and (Ticket.is_text(text) or _WITHIN.search(text)):
        raise ConfigError(
            "request id: the text is a ticket or contains one; pass the ticket itself to `pull` or `release`"
        )


class LeaseSeat(NamedTuple):
    """The slot of one reader in a lease. Only the owner and the reader know `settle_nonce`.

    A tuple, because the core takes it as it is.
    """

    slot: int
    nonce: int
    settle_nonce: int

    def __repr__(self) -> str:
        """Omits the secrets."""
        return f"LeaseSeat(slot={self.slot})"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The blocks of a request on one worker, pinned under one lease. Secret: its holder may read and settle.

    `block_ids` covers tokens 0…num_tokens of the request, and the last block may be partial. With several cache groups
    it has the lists of all groups, one after the other, and some groups may have fewer tokens. `ready` counts the units
    (see ReadyUnit) that were written when the ticket was created. If it is less than all, readers stream.
    """

    request_id: str
    worker_id: str
    epoch: int
    agent: str
    seats: tuple[LeaseSeat, ...]
    block_ids: array[int]
    num_tokens: int
    ready: int
    ready_unit: ReadyUnit = ReadyUnit.BLOCKS
    rank: int = 0
    """The rank of the owner among all ranks of its server, see kvlink.layout.rank_of."""
    num_ranks: int = 1
    ttl_s: float = 30.0
    """0 for a soft lease that does not expire."""
    signature: bytes = _UNSIGNED
    """Covers every field except `trace`. See `kvlink.control.security.tickets`."""
    group_sizes: tuple[int, ...] = ()
    """The number of block ids of each cache group. Empty if there is only one group."""
    group_tokens: tuple[int, ...] = ()
    """The number of tokens that each cache group keeps, at most `num_tokens`. Empty if there is only one group.

    A group of states counts as one that keeps all tokens.
    """
    trace: TraceParent | None = None
    """The span that created the ticket. It is not signed, because older peers would reject a signature over it."""
    digests: PrefixDigests | None = None
    """The digests of prefixes of the tokens, which the owner passed to `Worker.offer_soft`."""
    model: int = 0
    """The 8 bytes of the identity of the model that wrote the blocks, see `PoolModel`. 0: not known."""
    _signed: bytes = field(default=b"", init=False, repr=False, compare=False)
    """The result of `signed_bytes`, if it is known: a pull checks the signature, and takes microseconds."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a seat that no lease can have. Every ticket passes this check, whatever its source."""
        for seat in self.seats:
            settles = seat.settle_nonce >= SMALLEST_NONCE or self.soft
            if not 0 < seat.slot <= MAX_SLOTS or seat.nonce < SMALLEST_NONCE or not settles:
                raise ConfigError(
                    f"request {self.request_id!r:.80}: the ticket is forged: no lease has slot {seat.slot}, or its "
                    "nonces are not random"
                )

    def __repr__(self) -> str:
        """Describes the ticket without its secrets."""
        return (
            f"Ticket({self.request_id!r} on {self.worker_id!r} epoch {self.epoch}: {self.num_tokens} tokens in "
            f"{len(self.block_ids)} blocks, {'soft' if self.soft else f'{len(self.seats)} seat(s)'})"
        )

    @property
    def soft(self) -> bool:
        """Whether the lease is soft: it pins no block, any number of readers may use it, and none settles it."""
        return len(self.seats) == 1 and self.seats[0].settle_nonce == SHARED_SEAT

    def common_tokens(self, digests: Sequence[bytes]) -> int:
        """Returns how many of the first tokens a reader's prompt has in common, whose prefixes have these digests."""
        if self.digests is None:
            return 0
        return self.digests.num_common(digests) * (self.num_tokens // len(self.digests))

    def groups(self) -> list[array[int]]:
        """Returns the block ids of each cache group."""
        if not self.group_sizes:
            return [self.block_ids]
        ends = [*itertools.accumulate(self.group_sizes)]
        return [self.block_ids[end - size : end] for end, size in zip(ends, self.group_sizes, strict=True)]

    def tokens_of_groups(self) -> tuple[int, ...]:
        """Returns the number of tokens that each cache group keeps."""
        return self.group_tokens or (self.num_tokens,)

    def to_bytes(self) -> bytes:
        """Returns the wire form that the module describes. Raises ConfigError if a field exceeds its bound."""
        header, rest = self._parts()
        header += self.signature
        if self.trace is not None:
            header = header.ljust(_SIGNED_BYTES, b"\0") + self.trace.to_bytes()
        if self.digests is not None:
            header = header.ljust(_TRACED_BYTES, b"\0") + self.digests.header()
        if self.model:
            header = header.ljust(_DIGESTED_BYTES, b"\0") + _MODEL.pack(self.model)
        body = header + rest
        return _PREFIX.pack(_MAGIC, len(header), PROTOCOL_VERSION, zlib.crc32(body)) + body

    def signed_bytes(self) -> bytes:
        """Returns the bytes that a signature covers. Raises ConfigError as `to_bytes` does."""
        if self._signed:
            return self._signed
        digests = b"" if self.digests is None else self.digests.header()
        model = b"model" + _MODEL.pack(self.model) if self.model else b""
        return _MAGIC + b"".join(self._parts()) + digests + model

    def signed(self, sign: Callable[[bytes], bytes]) -> Ticket:
        """Returns the ticket with the signature that `sign` makes of `signed_bytes`."""
        message = self.signed_bytes()
        return replace(self, signature=sign(message))._with_signed(message)

    def _with_signed(self, message: bytes) -> Ticket:
        object.__setattr__(self, "_signed", message)
        return self

    def _parts(self) -> tuple[bytes, bytes]:
        names = [name.encode() for name in (self.request_id, self.worker_id, self.agent)]
        if any(len(name) > MAX_NAME_BYTES for name in names) or not names[0] or not names[1]:
            raise ConfigError(f"request and worker ids must have 1 to {MAX_NAME_BYTES} bytes: {self!r}")
        if not 1 <= len(self.seats) <= 255 or len(self.block_ids) > MAX_BLOCKS:
            raise ConfigError(f"a ticket has 1 to 255 seats and at most {MAX_BLOCKS} blocks: {self!r}")
        if not _fit(self.group_sizes, self.group_tokens, len(self.block_ids), self.num_tokens):
            raise ConfigError(
                f"a ticket has 2 to {MAX_GROUPS} groups or none, whose sizes add up to its blocks, and which keep at "
                f"most its tokens: {self!r}"
            )
        if len(self.signature) not in (0, SIGNATURE_BYTES):
            raise ConfigError(f"a signature has {SIGNATURE_BYTES} bytes: {self!r}")
        header = _HEADER.pack(
            self.epoch, self.num_tokens, len(self.block_ids), self.ready, self.ready_unit.value, len(self.seats),
            self.rank, self.num_ranks, len(names[0]), len(names[1]), len(names[2]), round(self.ttl_s * 1000),
            max(len(self.group_sizes), 1),
        )  # fmt: skip
        seats = b"".join(_SEAT.pack(seat.slot, seat.nonce, seat.settle_nonce) for seat in self.seats)
        groups = b"".join(
            itertools.starmap(_GROUP.pack, zip(self.group_sizes, self.group_tokens, strict=True))
        )
        digests = b"" if self.digests is None else self.digests.checked(self.num_tokens).data
        return header, seats + b"".join(names) + _little_endian(self.block_ids).tobytes() + groups + digests

    def to_text(self) -> str:
        """Returns a form of `to_bytes` that is safe in URLs and JSON."""
        return base64.urlsafe_b64encode(self.to_bytes()).decode()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Ticket:
        """Parses untrusted bytes. Raises ConfigError for anything that `to_bytes` cannot have written."""
        check_kind(blob, (bytes, bytearray, memoryview), "a ticket", "bytes")
        try:
            return _parse(blob)
        except (struct.error, UnicodeDecodeError, ValueError) as error:
            raise ConfigError(f"not a ticket of kvlink: {error}") from None

    @staticmethod
    def is_text(text: str) -> bool:
        """Returns whether `text` begins like the text of a ticket and is therefore not a request id."""
        return text.lstrip(_AROUND).startswith(_TEXT_PREFIX)

    @classmethod
    def from_text(cls, text: str) -> Ticket:
        """Parses the result of `to_text`, with or without surrounding blanks and quotes.

        Raises ConfigError for any other text.
        """
        check_kind(text, str, "a ticket's text", "text")
        text = text.strip(_AROUND)
        if len(text) > MAX_TICKET_BYTES * 4 // 3 + 4:
            raise ConfigError("not a ticket of kvlink: too long")
        try:
            blob = base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"not a ticket of kvlink: {error}") from None
        return cls.from_bytes(blob)


def _fit(sizes: Sequence[int], tokens: Sequence[int], num_blocks: int, num_tokens: int) -> bool:
    """Returns whether these can be the numbers of blocks and tokens of the groups of a ticket."""
    if not sizes and not tokens:
        return True
    counts_fit = 2 <= len(sizes) == len(tokens) <= MAX_GROUPS
    return counts_fit and min(*sizes, *tokens) >= 0 and sum(sizes) == num_blocks and max(tokens) <= num_tokens


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids


def _parse(blob: bytes) -> Ticket:
    if len(blob) > MAX_TICKET_BYTES:
        raise ValueError("too long")
    magic, header_bytes, version, checksum = _PREFIX.unpack_from(blob)
    if magic != _MAGIC:
        raise ValueError("wrong magic")
    if version != PROTOCOL_VERSION:
        raise ValueError(f"protocol version {version}, this process speaks {PROTOCOL_VERSION}")
    body = memoryview(blob)[_PREFIX.size :]
    if zlib.crc32(body) != checksum:
        raise ValueError("checksum differs")
    if header_bytes < _HEADER.size:
        raise ValueError("header too short")
    epoch, num_tokens, num_blocks, ready, ready_unit, num_seats, rank, num_ranks, *rest = _HEADER.unpack_from(
        body
    )
    *name_bytes, ttl_ms, num_groups = rest
    if max(name_bytes) > MAX_NAME_BYTES or not 1 <= num_groups <= MAX_GROUPS:
        raise ValueError("a count exceeds its bound")
    if num_blocks > MAX_BLOCKS or not num_seats:
        raise ValueError("a count exceeds its bound")
    at = header_bytes
    seats = tuple(LeaseSeat(*_SEAT.unpack_from(body, at + i * _SEAT.size)) for i in range(num_seats))
    at += num_seats * _SEAT.size
    listed = num_groups if num_groups > 1 else 0
    end = at + sum(name_bytes) + 4 * num_blocks + _GROUP.size * listed
    if len(body) < end:
        raise ValueError("the length differs from the header")
    digests = PrefixDigests.parse(body[_TRACED_BYTES:header_bytes], body[end:], num_tokens)
    names = []
    for size in name_bytes:
        names.append(bytes(body[at : at + size]).decode())
        at += size
    block_ids, group_sizes, group_tokens = _blocks(body[at:], num_blocks, listed, num_tokens)
    signature, trace = _extension(body, header_bytes) if header_bytes > _HEADER.size else (_UNSIGNED, None)
    has_model = header_bytes >= _DIGESTED_BYTES + _MODEL.size
    (model,) = _MODEL.unpack_from(body, _DIGESTED_BYTES) if has_model else (0,)
    ticket = Ticket(
        request_id=names[0], worker_id=names[1], epoch=epoch, agent=names[2], seats=seats,
        block_ids=_little_endian(block_ids), num_tokens=num_tokens, ready=ready,
        ready_unit=ReadyUnit(ready_unit), rank=rank, num_ranks=num_ranks, ttl_s=ttl_ms / 1000,
        signature=signature, group_sizes=group_sizes, group_tokens=group_tokens, trace=trace, digests=digests,
        model=model,
    )  # fmt: skip
    return ticket._with_signed(ticket.signed_bytes())


def _blocks(
    body: memoryview, num_blocks: int, num_groups: int, num_tokens: int
) -> tuple[array[int], tuple[int, ...], tuple[int, ...]]:
    """Returns the block ids, and the numbers of blocks and of tokens of each of `num_groups` groups."""
    block_ids = array("I")
    block_ids.frombytes(body[: 4 * num_blocks])
    numbers = struct.unpack_from(f"<{2 * num_groups}I", body, 4 * num_blocks)
    sizes, tokens = numbers[::2], numbers[1::2]
    if not _fit(sizes, tokens, num_blocks, num_tokens):
        raise ValueError("the groups do not add up to the blocks, or keep more tokens than there are")
    return block_ids, sizes, tokens


def _extension(body: memoryview, header_bytes: int) -> tuple[bytes, TraceParent | None]:
    """Returns the signature and the trace of a header that is longer than the shortest one."""
    signature = bytes(body[_HEADER.size : _SIGNED_BYTES]) if header_bytes >= _SIGNED_BYTES else _UNSIGNED
    traced = body[_SIGNED_BYTES:_TRACED_BYTES] if header_bytes >= _TRACED_BYTES else _UNSIGNED
    return signature if any(signature) else _UNSIGNED, TraceParent.from_bytes(bytes(traced))


def trace_in(blob: bytes) -> TraceParent | None:
    """Returns the trace of a ticket for a program that only forwards it. None without a trace or a valid ticket."""
    try:
        magic, header_bytes, _, _ = _PREFIX.unpack_from(blob)
    except struct.error:
        return None
    return _extension(memoryview(blob)[_PREFIX.size :], header_bytes)[1] if magic == _MAGIC else None
