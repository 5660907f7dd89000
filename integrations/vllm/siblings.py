# SPDX-License-Identifier: Apache-2.0
"""Requests of one server that come with the same hand-over: n above 1, several prompts, a retry. They share its lease.

Each reads as if it were alone, and the last to end gives the blocks back. Pure; on the scheduler's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from .handover import Handover

_SPENT = 4096

Key = tuple[str, int, int, int]
"""Worker, epoch, slot and nonce of a hand-over's first seat: of one lease."""


def key_of(handover: Handover) -> Key:
    """The lease that a hand-over is under."""
    owner, seat = handover.owners[0], handover.seats[0]
    return owner.worker_id, owner.epoch, seat.slot, seat.settle_nonce


@dataclass(slots=True)
class _Shared:
    live: set[str] = field(default_factory=set)
    settled_by: str = ""
    """The request whose load ends the lease: it was alone when it began."""
    read: bool = False


class Siblings:
    """Who is under which lease, and which leases this server has ended."""

    def __init__(self) -> None:
        self._shared: dict[Key, _Shared] = {}
        self._spent: OrderedDict[Key, bool] = OrderedDict()  # and whether a load was begun under it

    def join(self, handover: Handover, request_id: str) -> None:
        """A request has come with this hand-over."""
        self._shared.setdefault(key_of(handover), _Shared()).live.add(request_id)

    def are_there(self, handover: Handover) -> bool:
        """Whether a request is under this lease."""
        return key_of(handover) in self._shared

    def is_spent(self, handover: Handover) -> bool:
        """Whether this server has ended the lease: nothing can be read under it any more."""
        return key_of(handover) in self._spent

    def was_used(self, handover: Handover) -> bool:
        """Whether this server has ended the lease after a load, well or not."""
        return self._spent.get(key_of(handover), False)

    def must_wait(self, handover: Handover, request_id: str) -> bool:
        """Whether another one's load is under way that ends the lease, which would make this one's stale."""
        shared = self._shared.get(key_of(handover))
        return shared is not None and shared.settled_by not in ("", request_id)

    def settles(self, handover: Handover, request_id: str) -> bool:
        """Whether a load that begins now ends the lease: nobody else is under it."""
        shared = self._shared[key_of(handover)]
        if shared.live != {request_id}:
            return False
        shared.settled_by = request_id
        return True

    def has_read(self, handover: Handover) -> None:
        """A load under this lease went well."""
        if (shared := self._shared.get(key_of(handover))) is not None:
            shared.read = True

    def was_read(self, handover: Handover) -> bool:
        """Whether one did, of those that are under it."""
        shared = self._shared.get(key_of(handover))
        return shared is not None and shared.read

    def leave(self, handover: Handover, request_id: str) -> bool:
        """A request has ended. Whether it was the last under its lease. Idempotent: False then."""
        key = key_of(handover)
        shared = self._shared.get(key)
        if shared is None or request_id not in shared.live:
            return False
        shared.live.discard(request_id)
        if shared.settled_by == request_id:
            shared.settled_by = ""
        if shared.live:
            return False
        del self._shared[key]
        return True

    def spend(self, handover: Handover, *, used: bool) -> None:
        """The lease ends. `used`: a load was begun under it."""
        self._spent[key_of(handover)] = used
        while len(self._spent) > _SPENT:
            self._spent.popitem(last=False)
