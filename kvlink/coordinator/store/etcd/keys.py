# SPDX-License-Identifier: Apache-2.0
"""Which key holds what. `workers`, `tickets` and `settles` lie under their worker's lease and go with it.

Under /kvlink/1/<fleet>/<tenant>/, with a NUL where · stands:

    workers/<worker_id>          sealed card
    epochs/<worker_id>           LifeRecord: the last epoch given
    tickets/<request_id>·<rank>  OfferRequest, there until its time to live is over
    claims/<request_id>          ClaimRecord: whoever creates it has the tickets; there as long
    settles/<worker_id>·<id>     SettleRequest, deleted when passed on
    pulse                        written now and then, to see whether a watch still works
"""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote


class Key(NamedTuple):
    """A key taken apart. `part` is the rank of a ticket, the id of a settle order."""

    kind: bytes
    name: str
    part: str = ""


WORKERS, EPOCHS, TICKETS, CLAIMS, SETTLES = b"workers", b"epochs", b"tickets", b"claims", b"settles"


class Keys:
    """The keys of one tenant of a fleet; "" where there are no tenants."""

    def __init__(self, fleet: str, tenant: str = "") -> None:
        self.prefix = f"/kvlink/1/{quote(fleet, safe='')}/{quote(tenant, safe='')}/".encode()
        self.pulse = self.prefix + b"pulse"

    def worker(self, worker_id: str) -> bytes:
        """Of its card."""
        return b"%bworkers/%b" % (self.prefix, worker_id.encode())

    def epoch(self, worker_id: str) -> bytes:
        """Of its last known process."""
        return b"%bepochs/%b" % (self.prefix, worker_id.encode())

    def ticket(self, request_id: str, rank: int) -> bytes:
        """Of one rank."""
        return b"%btickets/%b\0%d" % (self.prefix, request_id.encode(), rank)

    def tickets(self, request_id: str) -> bytes:
        """Prefix of all ranks; also of tickets of other requests whose name goes on with NUL."""
        return b"%btickets/%b\0" % (self.prefix, request_id.encode())

    def claim(self, request_id: str) -> bytes:
        """Who has claimed."""
        return b"%bclaims/%b" % (self.prefix, request_id.encode())

    def settle(self, worker_id: str, name: str) -> bytes:
        """One order."""
        return b"%bsettles/%b\0%b" % (self.prefix, worker_id.encode(), name.encode())

    def parse(self, key: bytes) -> Key | None:
        """None for a key that no coordinator of this version writes."""
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
