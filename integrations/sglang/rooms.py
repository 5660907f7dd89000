# SPDX-License-Identifier: Apache-2.0
"""Which requests of this process own which rooms. A room is a number that the router chose: two requests may have one.

SGLang keeps all it knows of a request under its room. Two that live at once would take each other's status, and one
of them the other's tokens, so the second is refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from .messages import Want


class LiveRooms:
    """Rooms and their owners: the senders, or the receivers, of one scheduler process. On the scheduler's thread only.

    An owner that nobody refers to any more has given its room back.
    """

    def __init__(self) -> None:
        self._owners: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()

    def claim(self, room: int, owner: object) -> str:
        """Makes `owner` the owner of a room that has none. Returns why not, or ""."""
        if self._owners.setdefault(room, owner) is owner:
            return ""
        return (
            f"bootstrap_room {room} belongs to a request that is still running here; the router must choose another "
            "one for each request, and for each attempt at one"
        )

    def owner(self, room: int) -> object | None:
        """Whose the room is now."""
        return self._owners.get(room)

    def owns(self, room: int, owner: object) -> bool:
        """Whether the room is this owner's."""
        return self._owners.get(room) is owner

    def release(self, room: int, owner: object) -> None:
        """The request has ended. Another owner's room stays. Idempotent."""
        if self.owns(room, owner):
            del self._owners[room]


def refusal(wants: Mapping[tuple[str, int], Want], want: Want) -> str:
    """Why a want cannot join those of its room: it comes from the same rank of another decode server; or "".

    wants: by address of their decode ranks.
    """
    for address, other in wants.items():
        if other.tp_rank == want.tp_rank and address != (want.endpoint, want.dst_port):
            return (
                f"bootstrap_room {want.room} is being handed over to the decode server at {other.endpoint}:"
                f"{other.dst_port} already; the router must choose another room for each request"
            )
    return ""
