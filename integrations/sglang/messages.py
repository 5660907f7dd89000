# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between decode and prefill over SGLang's ZMQ sockets, besides SGLang's own.

A message consists of frames, the first of which is its tag. Messages of peers are bounded, and refused if malformed.

- want: decode has pages ready for a room: tag | header | decode's host
- chunk: prefill has written pages of it: tag | header | one cache index per ticket | tickets… | aux rows…
- failed: prefill has failed it: tag | header | reason

Every header begins with the version, the room and the generation, in every version, so that a message that cannot be
read fails its room and no other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvlink.errors import ConfigError
from kvlink.ticket import MAX_BLOCKS, Ticket

WANT = b"KVLINK_WANT"
CHUNK = b"KVLINK_CHUNK"
FAILED = b"KVLINK_FAILED"

_VERSION = 2
_ATTEMPT = struct.Struct("<HQQ")
_ASKER = struct.Struct("<HQQH")
_WANT = struct.Struct("<HQQHHHHHIB")
_CHUNK = struct.Struct("<HQQIIIBBBB")
_FAILED = struct.Struct("<HQQI")
_MAX_HOST_BYTES = 255
_MAX_ROWS = 64
_MAX_AUX_BYTES = 16 << 20
_MAX_REASON_BYTES = 4096
MAX_FRAMES = 3 + 255 + _MAX_ROWS
"""No message has more frames."""
MAX_ROOM = (1 << 63) - 1


def problem_of_room(room: object) -> str:
    """Returns why a request cannot have this bootstrap_room, or ""."""
    if isinstance(room, int) and not isinstance(room, bool) and 0 < room <= MAX_ROOM:
        return ""
    shown = room if isinstance(room, int) else type(room).__name__
    return f"bootstrap_room must be an integer from 1 to 2^63 - 1, not {shown!s:.40}"


class Malformed(ConfigError):
    """A message of a peer that cannot be read. `room` and `generation` are those of the attempt that it is about.

    `asker` is the address to answer to, if it is known.
    """

    def __init__(self, kind: str, problem: object, frames: Sequence[bytes]) -> None:
        super().__init__(
            f"a peer sent a malformed {kind}: {problem!s:.200}; run the same kvlink on both servers"
        )
        header = frames[1] if len(frames) > 1 else b""
        known = len(header) >= _ATTEMPT.size
        _, self.room, self.generation = _ATTEMPT.unpack_from(header) if known else (0, 0, 0)
        self.asker: tuple[str, int] | None = None
        if kind == "want" and len(header) >= _ASKER.size and len(frames) > 2:
            self.asker = (
                frames[2][:_MAX_HOST_BYTES].decode("ascii", "replace"),
                _ASKER.unpack_from(header)[3],
            )


@dataclass(frozen=True, slots=True)
class Want:
    """Announces that decode's pages for a room are allocated. SGLang's common classes read some fields by their names.

    `room` identifies the request between the servers. `generation` identifies this attempt, so that answers to an
    earlier attempt at the same room are distinguished.
    """

    room: int
    generation: int
    endpoint: str
    """The host of the decode rank's socket."""
    dst_port: int
    total_heads: int
    """The KV heads of the whole model; 1 for MLA."""
    tp_rank: int
    tp_size: int
    required_dst_info_num: int
    """The number of decode ranks that come to this prefill rank."""
    prefix_tokens: int
    """The tokens that decode has cached; prefill hands off what follows."""
    is_dummy: bool
    """True if this want is only counted, because another prefill rank has the same bytes."""

    @property
    def address(self) -> tuple[str, int]:
        """The address of the decode rank's socket."""
        return (self.endpoint, self.dst_port)

    def to_frames(self) -> list[bytes]:
        """Serializes the message for `from_frames`."""
        header = _WANT.pack(
            _VERSION, self.room, self.generation, self.dst_port, self.total_heads, self.tp_rank,
            self.tp_size, self.required_dst_info_num, self.prefix_tokens, self.is_dummy,
        )  # fmt: skip
        return [WANT, header, self.endpoint.encode()]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Want:
        """Parses frames of a peer. Raises Malformed."""
        try:
            _, header, host = frames
            room, generation, port, heads, tp_rank, tp_size, num_ranks, prefix, is_dummy = _unpack(
                _WANT, header
            )
            endpoint = host.decode("ascii")
            if not 0 < len(host) <= _MAX_HOST_BYTES or not endpoint.isprintable() or " " in endpoint:
                raise ValueError(f"{host[:40]!r} is no host")
            if not 0 <= tp_rank < tp_size or not port or not heads or not 0 < num_ranks <= tp_size:
                raise ValueError(
                    f"rank {tp_rank} of {tp_size}, {num_ranks} with {heads} heads at port {port}"
                )
            if problem := problem_of_room(room):
                raise ValueError(problem)
        except (ValueError, struct.error) as error:
            raise Malformed("want", error, frames) from None
        return cls(
            room, generation, endpoint, port, heads, tp_rank, tp_size, num_ranks, prefix, bool(is_dummy)
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Announces that pages from `first_page` of a want are written. It has no tickets if this rank lacks their heads.

    Each ticket comes with the index of its cache, of which this rank has `num_caches`. The last chunk has a row of each
    metadata buffer in `aux`.
    """

    room: int
    generation: int
    prefill_rank: int
    first_page: int
    num_pages: int
    is_last: bool
    num_caches: int
    tickets: tuple[tuple[int, Ticket], ...] = ()
    aux: tuple[bytes, ...] = ()

    def to_frames(self) -> list[bytes]:
        """Serializes the message for `from_frames`."""
        header = _CHUNK.pack(
            _VERSION, self.room, self.generation, self.prefill_rank, self.first_page, self.num_pages,
            self.is_last, len(self.tickets), len(self.aux), self.num_caches,
        )  # fmt: skip
        caches = bytes(cache for cache, _ in self.tickets)
        return [CHUNK, header, caches, *(ticket.to_bytes() for _, ticket in self.tickets), *self.aux]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Chunk:
        """Parses frames of a peer. Raises Malformed."""
        try:
            _, header, caches, *rest = frames
            room, generation, rank, first, count, is_last, num_tickets, num_rows, num_caches = _unpack(
                _CHUNK, header
            )
            if len(caches) != num_tickets or len(rest) != num_tickets + num_rows or num_rows > _MAX_ROWS:
                raise ValueError("the number of frames differs from its header")
            if any(index >= num_caches for index in caches) or len(set(caches)) != num_tickets:
                raise ValueError("a ticket of a cache that does not exist, or two of one")
            aux = tuple(rest[num_tickets:])
            if first + count > MAX_BLOCKS or sum(map(len, aux)) > _MAX_AUX_BYTES:
                raise ValueError("a count exceeds its bound")
            tickets = tuple(zip(caches, map(Ticket.from_bytes, rest[:num_tickets]), strict=True))
        except (ValueError, struct.error, ConfigError) as error:
            raise Malformed("chunk", error, frames) from None
        return cls(room, generation, rank, first, count, bool(is_last), num_caches, tickets, aux)


@dataclass(frozen=True, slots=True)
class Failed:
    """Announces that prefill has failed an attempt at a room, or refuses it."""

    room: int
    generation: int
    prefill_rank: int
    reason: str

    def to_frames(self) -> list[bytes]:
        """Serializes the message for `from_frames`."""
        header = _FAILED.pack(_VERSION, self.room, self.generation, self.prefill_rank)
        return [FAILED, header, self.reason.encode("utf-8", "replace")[:_MAX_REASON_BYTES]]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Failed:
        """Parses frames of a peer. Raises Malformed."""
        try:
            _, header, reason = frames
            room, generation, rank = _unpack(_FAILED, header)
        except (ValueError, struct.error) as error:
            raise Malformed("report", error, frames) from None
        return cls(room, generation, rank, reason[:_MAX_REASON_BYTES].decode("utf-8", "replace"))


def _unpack(header: struct.Struct, data: bytes) -> Any:
    version = int.from_bytes(data[:2], "little")
    if len(data) >= _ATTEMPT.size and version != _VERSION:
        raise ValueError(
            f"the other server's kvlink uses version {version} of its messages, this one {_VERSION}"
        )
    return header.unpack(data)[1:]
