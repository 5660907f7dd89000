# SPDX-License-Identifier: Apache-2.0
"""Defines the messages between decode and prefill over SGLang's ZMQ sockets, besides SGLang's own.

A message consists of frames, the first of which is its tag. Messages of peers are bounded, and refused if malformed.

- want: decode has pages ready for a room: tag | header | decode's host
- chunk: prefill has written pages of it: tag | header | one cache index per ticket | tickets… | aux rows…
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

_VERSION = 1
_WANT = struct.Struct("<HQQHHHHHIB")
_CHUNK = struct.Struct("<HQQIIIBBB")
_MAX_HOST_BYTES = 255
_MAX_ROWS = 64
_MAX_AUX_BYTES = 16 << 20


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

    def to_frames(self) -> list[bytes]:
        """Serializes the message for `from_frames`."""
        header = _WANT.pack(
            _VERSION, self.room, self.generation, self.dst_port, self.total_heads, self.tp_rank,
            self.tp_size, self.required_dst_info_num, self.prefix_tokens, self.is_dummy,
        )  # fmt: skip
        return [WANT, header, self.endpoint.encode()]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Want:
        """Parses frames of a peer. Raises ConfigError."""
        try:
            _, header, host = frames
            room, generation, port, heads, tp_rank, tp_size, num_ranks, prefix, is_dummy = _unpack(
                _WANT, header
            )
            endpoint = host.decode()
        except (ValueError, struct.error) as error:
            raise _malformed("want", error) from None
        if not 0 < len(host) <= _MAX_HOST_BYTES or not 0 <= tp_rank < tp_size or not port or not num_ranks:
            raise ConfigError(
                f"a peer sent a malformed want: rank {tp_rank} of {tp_size}, {num_ranks} at {host!r}:{port}"
            )
        return cls(
            room, generation, endpoint, port, heads, tp_rank, tp_size, num_ranks, prefix, bool(is_dummy)
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Announces that pages from `first_page` of a want are written. It has no tickets if this rank lacks their heads.

    Each ticket comes with the index of its cache. The last chunk has a row of every metadata buffer in `aux`.
    """

    room: int
    generation: int
    prefill_rank: int
    first_page: int
    num_pages: int
    is_last: bool
    tickets: tuple[tuple[int, Ticket], ...] = ()
    aux: tuple[bytes, ...] = ()

    def to_frames(self) -> list[bytes]:
        """Serializes the message for `from_frames`."""
        header = _CHUNK.pack(
            _VERSION, self.room, self.generation, self.prefill_rank, self.first_page, self.num_pages,
            self.is_last, len(self.tickets), len(self.aux),
        )  # fmt: skip
        caches = bytes(cache for cache, _ in self.tickets)
        return [CHUNK, header, caches, *(ticket.to_bytes() for _, ticket in self.tickets), *self.aux]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Chunk:
        """Parses frames of a peer. Raises ConfigError."""
        try:
            _, header, caches, *rest = frames
            room, generation, rank, first, count, is_last, num_tickets, num_rows = _unpack(_CHUNK, header)
        except (ValueError, struct.error) as error:
            raise _malformed("chunk", error) from None
        if len(caches) != num_tickets or len(rest) != num_tickets + num_rows or num_rows > _MAX_ROWS:
            raise ConfigError("a peer sent a malformed chunk: the number of frames differs from its header")
        aux = tuple(rest[num_tickets:])
        if first + count > MAX_BLOCKS or sum(map(len, aux)) > _MAX_AUX_BYTES:
            raise ConfigError("a peer sent a malformed chunk: a count exceeds its bound")
        tickets = tuple(zip(caches, map(Ticket.from_bytes, rest[:num_tickets]), strict=True))
        return cls(room, generation, rank, first, count, bool(is_last), tickets, aux)


def _malformed(kind: str, error: Exception) -> ConfigError:
    return ConfigError(f"a peer sent a malformed {kind}: {error}; run the same kvlink on both servers")


def _unpack(header: struct.Struct, data: bytes) -> Any:
    version, *fields = header.unpack(data)
    if version != _VERSION:
        raise ConfigError(
            f"the other server's kvlink uses version {version} of its messages, this one {_VERSION}; run "
            f"the same kvlink on both"
        )
    return fields
