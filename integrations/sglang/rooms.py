# SPDX-License-Identifier: Apache-2.0
"""Tracks which requests of this process own which rooms. A room is a number that the router chose, maybe twice.

SGLang keeps everything about a request under its room. Two live requests with one room would share their status, and
one of them would get the tokens of the other, so the second is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from .messages import Want


class LiveRooms:
    """The rooms of the senders, or the receivers, of one scheduler process, with their owners.

    It is used on the scheduler's thread only. An owner without references has released its room.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def assign(self, room: int, owner: object) -> str:
        """Makes `owner` the owner of a room that has none. Returns why that is impossible, or ""."""
        if self._owners.setdefault(room, owner) is owner:
            return ""
        return (
            f"bootstrap_room {room} belongs to a request that is still running here; let the router choose another "
            "one for each request, and for each attempt at one"
        )

    def owner(self, room: int) -> object | None:
        """Returns the room's current owner."""
        return self._owners.get(room)

    def owns(self, room: int, owner: object) -> bool:
        """Returns whether `owner` owns the room."""
        return self._owners.get(room) is owner

    def release(self, room: int, owner: object) -> None:
        """Releases the room of a request that has ended. Another owner's room stays. Idempotent."""
        if self.owns(room, owner):
            del self._owners[room]


def refusal(wants: Mapping[tuple[str, int], Want], want: Want) -> str:
    """Returns why a want cannot join those of its room, or "": it comes from the same rank of another decode server.

    `wants` is keyed by the address of the decode rank.
    """
    for address, other in wants.items():
        if other.tp_rank == want.tp_rank and address != (want.endpoint, want.dst_port):
            return (
                f"bootstrap_room {want.room} is already handed off to the decode server at {other.endpoint}:"
                f"{other.dst_port} ; let the router choose another room for each request"
            )
    return ""
