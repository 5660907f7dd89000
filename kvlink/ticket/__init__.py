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
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvlink.errors import ConfigError
from kvlink.layout.groups import MAX_GROUPS
from kvlink.runtime.names import MAX_NAME_BYTES, check_kind, check_name
from kvlink.ticket.prefix_digests import MAX_DIGEST_BYTES, PrefixDigests
from kvlink.tracing import traceparent
from kvlink.tracing.traceparent import TraceParent
from kvlink.types import ReadyUnit

_PREFIX = struct.Struct("<4sHHI")
_HEADER_BYTES, _SEAT_BYTES = 38, 20
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
_TRACE_AT = _HEADER_BYTES + SIGNATURE_BYTES
MAX_TICKET_BYTES = (
    _PREFIX.size + 4096 + 255 * _SEAT_BYTES + 3 * MAX_NAME_BYTES + 4 * MAX_BLOCKS + 8 * MAX_GROUPS
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
        # Here, because the coordinator and the command line import this module, and carry tickets unread.
        from kvlink import _core

        digests = PrefixDigests(0, b"") if self.digests is None else self.digests.checked(self.num_tokens)
        try:
            groups = array("I", itertools.chain(*zip(self.group_sizes, self.group_tokens, strict=True)))
            return _core.write_ticket(
                self.request_id, self.worker_id, self.agent, self.epoch, self.seats, self.block_ids.tobytes(),
                groups.tobytes(), self.num_tokens, self.ready, self.ready_unit.value, self.rank, self.num_ranks,
                round(self.ttl_s * 1000), self.signature, self.trace.to_bytes() if self.trace else b"",
                digests.size, digests.data, self.model,
            )  # fmt: skip
        except ConfigError as error:
            raise ConfigError(f"{error.args[0]}: {self!r}") from None
        except (TypeError, OverflowError, ValueError):
            raise ConfigError(
                f"a number exceeds its type, or the lists of groups differ in length: {self!r}"
            ) from None

    def signed_bytes(self) -> bytes:
        """Returns the bytes that a signature covers. Raises ConfigError as `to_bytes` does."""
        return self._signed or self._keep_signed(self.to_bytes())._signed

    def signed(self, sign: Callable[[bytes], bytes]) -> Ticket:
        """Returns the ticket with the signature that `sign` makes of `signed_bytes`."""
        message = self.signed_bytes()
        return replace(self, signature=sign(message))._with_signed(message)

    def _keep_signed(self, blob: bytes) -> Ticket:
        """Takes from the wire form what a signature covers: all but the trace and the signature itself."""
        _, header_bytes, *_ = _PREFIX.unpack_from(blob)
        digests = b"" if self.digests is None else self.digests.header()
        model = b"model" + _MODEL.pack(self.model) if self.model else b""
        header, rest = blob[_PREFIX.size :][:_HEADER_BYTES], blob[_PREFIX.size + header_bytes :]
        return self._with_signed(_MAGIC + header + rest + digests + model)

    def _with_signed(self, message: bytes) -> Ticket:
        object.__setattr__(self, "_signed", message)
        return self

    def to_text(self) -> str:
        """Returns a form of `to_bytes` that is safe in URLs and JSON."""
        return base64.urlsafe_b64encode(self.to_bytes()).decode()

    @classmethod
    def from_bytes(cls, blob: bytes) -> Ticket:
        """Parses untrusted bytes. Raises ConfigError for anything that `to_bytes` cannot have written."""
        check_kind(blob, (bytes, bytearray, memoryview), "a ticket", "bytes")
        from kvlink import _core

        blob = bytes(blob)
        (
            request_id, worker_id, agent, epoch, seats, ids, groups, num_tokens, ready, ready_unit, rank, num_ranks,
            ttl_ms, signature, trace, digest_bytes, digests, model,
        ) = _core.read_ticket(blob)  # fmt: skip
        numbers = array("I", groups)
        ticket = cls(
            request_id, worker_id, epoch, agent, tuple(map(LeaseSeat._make, seats)), array("I", ids), num_tokens, ready,
            ReadyUnit(ready_unit), rank, num_ranks, ttl_ms / 1000, signature, tuple(numbers[::2]), tuple(numbers[1::2]),
            TraceParent.from_bytes(trace), PrefixDigests(digest_bytes, digests) if digests else None, model,
        )  # fmt: skip
        return ticket._keep_signed(blob) if signature else ticket

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


def trace_in(blob: bytes) -> TraceParent | None:
    """Returns the trace of a ticket for a program that only forwards it. None without a trace or a valid ticket."""
    try:
        magic, header_bytes, _, _ = _PREFIX.unpack_from(blob)
    except struct.error:
        return None
    if magic != _MAGIC or header_bytes < _TRACE_AT + traceparent.NUM_BYTES:
        return None
    return TraceParent.from_bytes(
        bytes(memoryview(blob)[_PREFIX.size :][_TRACE_AT:][: traceparent.NUM_BYTES])
    )
