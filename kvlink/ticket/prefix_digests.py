# SPDX-License-Identifier: Apache-2.0
"""Defines the digests in a ticket that say of which tokens its blocks are, so that a reader can compare prefixes."""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlink.errors import ConfigError

_HEADER = struct.Struct("<IB")
_BYTES = range(8, 65)
"""How long a digest may be."""
MAX_DIGEST_BYTES = 4 << 20
_DIGEST_BYTES = 16


def digest_prefixes(
    token_ids: Sequence[int], block_tokens: int, *, salt: str = "", adapter: str = ""
) -> list[bytes]:
    """Returns a digest of each prefix of full blocks, 16 bytes each, for servers that have no digests of their own.

    salt: secret of the users who may share KV; others do not find it. Without one, everybody shares.
    adapter: name and version of the LoRA adapter. Whatever else the KV depends on, such as images, belongs in here too.
    Raises ConfigError for anything but ids of 0 to 2^64 - 1.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be 1 or more, not {block_tokens}")
    digest = hashlib.sha256(b"kvlink prefix 1")
    for text in (salt, adapter, str(block_tokens)):
        digest.update(len(text.encode()).to_bytes(4, "little") + text.encode())
    try:
        ids = array("Q", token_ids)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers of 0 to 2^64 - 1: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    digests = []
    for end in range(block_tokens, len(ids) + 1, block_tokens):
        digest.update(ids[end - block_tokens : end].tobytes())
        digests.append(digest.digest()[:_DIGEST_BYTES])
    return digests


@dataclass(frozen=True, slots=True)
class PrefixDigests:
    """Digests of the prefixes of a request's tokens, at equal distances. The last one covers all tokens of the ticket.

    Each covers all tokens before its end, so two requests have a prefix in common if and only if they have its digest.
    The engine computes them. Its digests must depend on all that the KV of a token depends on, adapters and images too.
    """

    size: int
    """The number of bytes of each digest."""
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, digests: Sequence[bytes]) -> PrefixDigests:
        """Joins digests of equal length, 8 to 64 bytes each. Raises ConfigError for anything else."""
        sizes = {len(each) for each in digests}
        if len(sizes) != 1 or not sizes <= set(_BYTES):
            raise ConfigError(
                f"digests must have the same length, 8 to 64 bytes, and there must be one; the lengths of these "
                f"{len(digests)} are {sorted(sizes)}"
            )
        return cls(sizes.pop(), b"".join(digests))

    def __len__(self) -> int:
        """The number of digests."""
        return len(self.data) // self.size

    def __getitem__(self, index: int) -> bytes:
        """Returns the digest of the prefix that ends behind `index + 1` equal shares of the tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"digest {index} of {len(self)}")
        return self.data[index * self.size : (index + 1) * self.size]

    def num_common(self, others: Sequence[bytes]) -> int:
        """Returns how many of the first digests are equal. The others may be longer, and only their start counts."""
        low, high = 0, min(len(self), len(others))
        while low < high:  # an equal digest means that all before it are equal
            middle = (low + high + 1) // 2
            if self[middle - 1] == others[middle - 1][: self.size]:
                low = middle
            else:
                high = middle - 1
        return low

    def checked(self, num_tokens: int) -> PrefixDigests:
        """Returns itself. Raises ConfigError unless a ticket of so many tokens can have it."""
        if not self.data or len(self.data) > MAX_DIGEST_BYTES or num_tokens % len(self):
            raise ConfigError(
                f"a ticket of {num_tokens} tokens cannot have {len(self)} digests of {self.size} bytes: their number "
                f"must divide the number of tokens, and they may have {MAX_DIGEST_BYTES} bytes in all"
            )
        return self

    def header(self) -> bytes:
        """Returns the part of a ticket's header that says how long `data` is."""
        return _HEADER.pack(len(self), self.size)
