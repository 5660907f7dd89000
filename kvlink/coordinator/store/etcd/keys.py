# SPDX-License-Identifier: Apache-2.0
"""Defines the keys in etcd. `workers`, `tickets` and `settles` belong to their worker's lease and end with it.

The keys under /kvlink/1/<fleet>/<tenant>/ are these, where · stands for NUL:

    workers/<worker_id>          sealed card
    epochs/<worker_id>           LifeRecord with the last granted epoch
    tickets/<request_id>·<rank>  OfferRequest, kept until its time to live is over
    claims/<request_id>          ClaimRecord, whose creator has the tickets; kept as long as they are
    settles/<worker_id>·<id>     SettleRequest, deleted when forwarded
    pulse                        written regularly to check that a watch still works
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote


class Key(NamedTuple):
    """Holds the parts of a key. `part` is the rank of a ticket or the id of a settle order."""

    kind: bytes
    name: str
    part: str = ""


WORKERS, EPOCHS, TICKETS, CLAIMS, SETTLES = b"workers", b"epochs", b"tickets", b"claims", b"settles"


class Keys:
    """Builds and parses the keys of one tenant of a fleet. The tenant is "" where there are no tenants."""

    def __init__(self, fleet: str, tenant: str = "") -> None:
        self.prefix = f"/kvlink/1/{quote(fleet, safe='')}/{quote(tenant, safe='')}/".encode()
        self.pulse = self.prefix + b"pulse"

    def worker(self, worker_id: str) -> bytes:
        """Returns the key of a worker's card."""
        return b"%bworkers/%b" % (self.prefix, worker_id.encode())

    def epoch(self, worker_id: str) -> bytes:
        """Returns the key of a worker's last known process."""
        return b"%bepochs/%b" % (self.prefix, worker_id.encode())

    def ticket(self, request_id: str, rank: int) -> bytes:
        """Returns the key of one rank's ticket."""
        return b"%btickets/%b\0%d" % (self.prefix, request_id.encode(), rank)

    def tickets(self, request_id: str) -> bytes:
        """Returns the prefix of all ranks' tickets. Tickets of requests whose names continue with NUL also have it."""
        return b"%btickets/%b\0" % (self.prefix, request_id.encode())

    def claim_record(self, request_id: str) -> bytes:
        """Returns the key of a request's claim record."""
        return b"%bclaims/%b" % (self.prefix, request_id.encode())

    def settle_order(self, worker_id: str, name: str) -> bytes:
        """Returns the key of one settle order."""
        return b"%bsettles/%b\0%b" % (self.prefix, worker_id.encode(), name.encode())

    def parse(self, key: bytes) -> Key | None:
        """Splits a key. Returns None for a key that no coordinator of this version writes."""
        kind, _, rest = key.removeprefix(self.prefix).partition(b"/")
        try:
            if kind in (TICKETS, SETTLES):
                name, _, part = rest.rpartition(b"\0")
                return Key(kind, name.decode(), part.decode())
            if kind in (WORKERS, EPOCHS, CLAIMS):
                return Key(kind, rest.decode())
        except UnicodeDecodeError:
            pass
        return None
