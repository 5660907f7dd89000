# SPDX-License-Identifier: Apache-2.0
"""Tracks which requests of this process own which rooms. A room is a number that the router chose, maybe twice.

SGLang keeps everything about a request under its room. Two live requests with one room would share their status, and
one of them would get the tokens of the other, so the second is refused.
"""

from __future__ import annotations

import weakref


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
            f"bootstrap_room {room} belongs to a request that is still running here; the samples of a request with n "
            "above 1 share one room, which is not supported with disaggregation: send one request for each sample; "
            "else let the router choose another one for each request, and for each attempt at one"
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
