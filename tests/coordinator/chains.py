# SPDX-License-Identifier: Apache-2.0
"""Prompts as short texts, and what a worker publishes or asks for one: each letter is a block of 16 tokens."""

from __future__ import annotations

import hashlib

from kvlink.control.values import FoundPrefix, Prefix, PrefixQuery

SCOPE, STEP = bytes(16), 16


def chain(prompt: str) -> list[bytes]:
    """A digest for each prefix."""
    return [hashlib.sha256(prompt[:end].encode()).digest() for end in range(1, len(prompt) + 1)]


def keys(prompt: str) -> bytes:
    return b"".join(each[:8] for each in chain(prompt))


def prefix(prompt: str, name: str = "", rank: int = 0, of: int = 1, ttl_s: float = 60.0) -> Prefix:
    ticket = f"ticket of {prompt} {name} rank {rank}".encode()
    return Prefix(name or prompt, ttl_s, rank, of, SCOPE, STEP, keys(prompt), ticket)


def query(
    prompt: str, more_than: int = 0, most: int = 1, worker_id: str = "", last: tuple[str, ...] = ()
) -> PrefixQuery:
    return PrefixQuery(SCOPE, STEP, keys(prompt), more_than, most, worker_id, last)


def shown(found: list[FoundPrefix]) -> list[tuple[int, str]]:
    """(number of keys, prompt of the first ticket) of each."""
    return [(each.num_keys, each.tickets[0].split()[2].decode()) for each in found]
