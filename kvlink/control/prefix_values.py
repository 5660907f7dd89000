# SPDX-License-Identifier: Apache-2.0
"""Defines requests and replies of the directory of prefixes. protos/kvlink/v1/prefixes.proto documents the fields."""

from __future__ import annotations

from typing import NamedTuple

KEY_BYTES = 8
SCOPE_BYTES = 16


class Prefix(NamedTuple):
    """Publishes one rank's soft ticket of a prefix. `ticket` is secret and opaque to the control plane."""

    request_id: str
    ttl_s: float
    rank: int
    num_ranks: int
    scope: bytes
    tokens_per_key: int
    keys: bytes
    ticket: bytes

    def __repr__(self) -> str:
        """Omits the ticket, which is secret."""
        return f"Prefix({self.request_id!r}, rank {self.rank} of {self.num_ranks}, {len(self.ticket)} bytes)"


class PrefixChanges(NamedTuple):
    """Tells a coordinator which prefixes a worker has, and the request ids of those that have ended."""

    worker_id: str
    epoch: int
    prefixes: tuple[Prefix, ...] = ()
    withdrawn: tuple[str, ...] = ()


class PrefixQuery(NamedTuple):
    """Asks for the longest prefix that other workers have. A match of `more_than` keys or fewer is of no use."""

    scope: bytes
    tokens_per_key: int
    keys: bytes
    more_than: int = 0
    most: int = 1
    worker_id: str = ""
    last: tuple[str, ...] = ()
    """Workers whose prefixes are named only if no other worker has any."""


class FoundPrefix(NamedTuple):
    """Names a server that has the first `num_keys` of the keys. `tickets` has one for each of its ranks."""

    num_keys: int
    tickets: tuple[bytes, ...]
    worker_ids: tuple[str, ...] = ()
    """The workers that published the tickets, or none if the coordinator does not name them."""

    def __repr__(self) -> str:
        """Omits the tickets, which are secret."""
        return f"FoundPrefix({self.num_keys} keys, {len(self.tickets)} tickets)"
