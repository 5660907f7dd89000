# SPDX-License-Identifier: Apache-2.0
"""What decode and prefill say to each other over SGLang's ZMQ sockets, beside its own ABORT and status messages.

A message is frames, the first its tag. Foreign ones are bounded, and refused as a whole when malformed.

    want   decode has pages ready for a room: tag | header | decode's host
    chunk  prefill has written pages of it:   tag | header | one cache index a ticket | tickets… | aux rows…
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Decode's pages for a room are allocated. Names that SGLang's common classes read are theirs.

    room: identifies the request between the servers. generation: this attempt, so that answers to an earlier one of
    the same room are told apart.
    """

    room: int
    generation: int
    endpoint: str
    """Host of the decode rank's socket."""
    dst_port: int
    total_heads: int
    """KV heads of the whole model; 1 for MLA."""
    tp_rank: int
    tp_size: int
    required_dst_info_num: int
    """Decode ranks that come to this prefill rank."""
    prefix_tokens: int
    """Cached by decode: prefill hands over what follows."""
    is_dummy: bool
    """Only to be counted; another prefill rank has the same bytes."""

    def to_frames(self) -> list[bytes]:
        """Inverse of `from_frames`."""
        header = _WANT.pack(
            _VERSION, self.room, self.generation, self.dst_port, self.total_heads, self.tp_rank,
            self.tp_size, self.required_dst_info_num, self.prefix_tokens, self.is_dummy,
        )  # fmt: skip
        return [WANT, header, self.endpoint.encode()]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Want:
        """Parses foreign frames. Raises ConfigError."""
        try:
            _, header, host = frames
            version, room, generation, port, heads, tp_rank, tp_size, num_ranks, prefix, is_dummy = (
                _WANT.unpack(header)
            )
            endpoint = host.decode()
        except (ValueError, struct.error) as error:
            raise ConfigError(f"not a want of kvlink: {error}") from None
        _check_version(version)
        if not 0 < len(host) <= _MAX_HOST_BYTES or not 0 <= tp_rank < tp_size or not port or not num_ranks:
            raise ConfigError(
                f"not a want of kvlink: rank {tp_rank} of {tp_size}, {num_ranks} at {host!r}:{port}"
            )
        return cls(
            room, generation, endpoint, port, heads, tp_rank, tp_size, num_ranks, prefix, bool(is_dummy)
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """Pages `first_page` … of what a want asked for are written. Without tickets: this rank has none of their heads.

    tickets: each with the index of its cache. aux: a row of every metadata buffer, with the last chunk.
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
        """Inverse of `from_frames`."""
        header = _CHUNK.pack(
            _VERSION, self.room, self.generation, self.prefill_rank, self.first_page, self.num_pages,
            self.is_last, len(self.tickets), len(self.aux),
        )  # fmt: skip
        caches = bytes(cache for cache, _ in self.tickets)
        return [CHUNK, header, caches, *(ticket.to_bytes() for _, ticket in self.tickets), *self.aux]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> Chunk:
        """Parses foreign frames. Raises ConfigError."""
        try:
            _, header, caches, *rest = frames
            version, room, generation, rank, first, count, is_last, num_tickets, num_rows = _CHUNK.unpack(
                header
            )
        except (ValueError, struct.error) as error:
            raise ConfigError(f"not a chunk of kvlink: {error}") from None
        _check_version(version)
        if len(caches) != num_tickets or len(rest) != num_tickets + num_rows or num_rows > _MAX_ROWS:
            raise ConfigError("not a chunk of kvlink: the number of frames differs from what the header says")
        aux = tuple(rest[num_tickets:])
        if first + count > MAX_BLOCKS or sum(map(len, aux)) > _MAX_AUX_BYTES:
            raise ConfigError("not a chunk of kvlink: a count exceeds its bound")
        tickets = tuple(zip(caches, map(Ticket.from_bytes, rest[:num_tickets]), strict=True))
        return cls(room, generation, rank, first, count, bool(is_last), tickets, aux)


def _check_version(version: int) -> None:
    if version != _VERSION:
        raise ConfigError(
            f"the other server's kvlink speaks version {version} to SGLang's, this one {_VERSION}"
        )
