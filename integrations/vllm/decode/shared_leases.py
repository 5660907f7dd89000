# SPDX-License-Identifier: Apache-2.0
"""Tracks requests of one server with the same handoff, which share its lease: n above 1, several prompts, a retry.

Each reads independently, and the last to end releases the blocks. Pure; used on the scheduler's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..wire.handoff import Handoff

_SPENT = 4096

Key = tuple[str, int, int, int]
"""Identifies a lease: worker, epoch, slot and nonce of a handoff's first seat."""


def key_of(handoff: Handoff) -> Key:
    """Returns the key of a handoff's lease."""
    owner, seat = handoff.owners[0], handoff.seats[0]
    return owner.worker_id, owner.epoch, seat.slot, seat.settle_nonce


@dataclass(slots=True)
class _Shared:
    live: set[str] = field(default_factory=set)
    settled_by: str = ""
    """The request whose load ends the lease: it was alone when the load began."""
    read: bool = False


class SharedLeases:
    """The requests under each lease, and the leases that this server has ended."""

    def __init__(self) -> None:
        self._shared: dict[Key, _Shared] = {}
        self._spent: dict[Key, bool] = {}  # whether a load was begun under it

    def join(self, handoff: Handoff, request_id: str) -> None:
        """Adds a request that came with this handoff."""
        self._shared.setdefault(key_of(handoff), _Shared()).live.add(request_id)

    def are_there(self, handoff: Handoff) -> bool:
        """Returns whether a request is under this lease."""
        return key_of(handoff) in self._shared

    def is_spent(self, handoff: Handoff) -> bool:
        """Returns whether this server has ended the lease, so that nothing can be read under it."""
        return key_of(handoff) in self._spent

    def was_used(self, handoff: Handoff) -> bool:
        """Returns whether this server has ended the lease after a load, well or not."""
        return self._spent.get(key_of(handoff), False)

    def must_wait(self, handoff: Handoff, request_id: str) -> bool:
        """Returns whether another request's load will end the lease, which would make this one's stale."""
        shared = self._shared.get(key_of(handoff))
        return shared is not None and shared.settled_by not in ("", request_id)

    def settles(self, handoff: Handoff, request_id: str) -> bool:
        """Returns whether a load that begins now ends the lease, because no other request is under it."""
        shared = self._shared[key_of(handoff)]
        if shared.live != {request_id}:
            return False
        shared.settled_by = request_id
        return True

    def has_read(self, handoff: Handoff) -> None:
        """Records that a load under this lease succeeded."""
        if (shared := self._shared.get(key_of(handoff))) is not None:
            shared.read = True

    def was_read(self, handoff: Handoff) -> bool:
        """Returns whether a load of the requests under this lease succeeded."""
        shared = self._shared.get(key_of(handoff))
        return shared is not None and shared.read

    def leave(self, handoff: Handoff, request_id: str) -> bool:
        """Removes a request. Returns whether it was the last under its lease; False if it was not under it."""
        key = key_of(handoff)
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

    def spend(self, handoff: Handoff, *, used: bool) -> None:
        """Records that the lease ends. `used` says that a load was begun under it."""
        self._spent[key_of(handoff)] = used
        while len(self._spent) > _SPENT:
            del self._spent[next(iter(self._spent))]
