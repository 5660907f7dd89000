# SPDX-License-Identifier: Apache-2.0
"""Implements decode's side: it pulls the pages of each room as prefill announces them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlink.errors import ConfigError, KVLinkError
from kvlink.transfer.pull import Pull

from .caches import Cache
from .messages import Chunk

_log = logging.getLogger("kvlink.sglang")


@dataclass(slots=True)
class _Room:
    """The destination of a room's bytes and its pulls. Guarded by the lock of Incoming."""

    generation: int
    pages: Any
    states: Sequence[Any | None]
    num_ranks: int
    pulls: list[Pull] = field(default_factory=list)
    pages_of: Counter[int] = field(default_factory=Counter)
    complete: set[int] = field(default_factory=set)
    """The prefill ranks that sent their last chunk."""
    aux: tuple[bytes, ...] = ()
    error: KVLinkError | None = None
    ended: bool = False
    """Set once `poll` has returned the result."""


class Incoming:
    """The pulls of one scheduler process. Chunks arrive on the listener's thread, the scheduler's thread polls."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = caches
        self._lock = threading.Lock()
        self._rooms: dict[int, _Room] = {}
        self._known: set[str] = set()

    def expect(self, room: int, pages: Any, states: Sequence[Any | None], num_ranks: int) -> None:
        """Prepares for the chunks of `num_ranks` prefill ranks. From now on the pages may be written.

        Raises ConfigError for a room whose earlier request still waits for its pages: the two would be confused.
        """
        with self._lock:
            earlier = self._rooms.get(room)
            if earlier is not None and not earlier.ended:
                raise ConfigError(
                    f"bootstrap_room {room} belongs to a request that is still being received; let the router choose "
                    "another one for each request"
                )
            self._rooms[room] = _Room(secrets.randbits(63), pages, states, num_ranks)
        _cancel_pulls(earlier)

    def generation(self, room: int) -> int:
        """Returns the number that chunks of this attempt at the room carry, to distinguish them from earlier ones."""
        return self._rooms[room].generation

    def arrived(self, chunk: Chunk) -> None:
        """Starts to read a chunk. Chunks of an unknown room or an earlier attempt are dropped."""
        with self._lock:
            room = self._rooms.get(chunk.room)
            if room is None or room.generation != chunk.generation or room.error is not None:
                return
            try:
                self._start(room, chunk)
            except KVLinkError as error:
                room.error = error

    def poll(self, room_id: int) -> tuple[bytes, ...] | None:
        """Returns the rows of the metadata buffers once all bytes are valid in place, until then None. Never waits.

        Raises KVLinkError if the room failed: the caller must `drop` it.
        """
        with self._lock:
            room = self._rooms.get(room_id)
            if room is None:
                return None
            try:
                complete = self._complete(room)
            except KVLinkError:
                room.ended = True
                raise
            room.ended = complete
            return room.aux if complete else None

    def drop(self, room_id: int) -> None:
        """Forgets a room. On return nothing writes its pages any more. Idempotent."""
        with self._lock:
            room = self._rooms.pop(room_id, None)
        _cancel_pulls(room)

    def _complete(self, room: _Room) -> bool:
        """Returns whether all bytes are in place. Raises KVLinkError if the room failed."""
        if room.error is not None:
            raise room.error
        room.pulls = [pull for pull in room.pulls if not self._landed(pull)]
        if room.pulls or len(room.complete) < room.num_ranks:
            return False
        # The last chunk may arrive before another.
        return all(room.pages_of[rank] == len(room.pages) for rank in room.complete)

    def _start(self, room: _Room, chunk: Chunk) -> None:
        end = chunk.first_page + chunk.num_pages
        if end > len(room.pages):
            raise ConfigError(f"prefill wrote pages up to {end} and decode has {len(room.pages)}")
        for index, ticket in chunk.tickets:
            if index >= len(self._caches):
                raise ConfigError(f"prefill has a cache {index} and decode has {len(self._caches)}")
            cache = self._caches[index]
            if cache.component is None:
                into = room.pages[chunk.first_page : end]
            else:
                states = room.states[cache.component] if cache.component < len(room.states) else None
                into = () if states is None else states
            if len(into) != len(ticket.block_ids):
                raise ConfigError(
                    f"prefill offers {len(ticket.block_ids)} items of cache {index}, decode has {len(into)}"
                )
            room.pulls.append(cache.worker.pull(ticket, np.asarray(into, dtype=np.uint32), partial=True))
        room.pages_of[chunk.prefill_rank] += chunk.num_pages
        if chunk.is_last:
            room.complete.add(chunk.prefill_rank)
            room.aux = room.aux or chunk.aux

    def _landed(self, pull: Pull) -> bool:
        """Returns whether a pull is complete and valid. Raises KVLinkError if it failed."""
        if not pull.done():
            return False
        pull.wait()  # raises the error of the pull
        for path in pull.explain():
            if path.worker_id not in self._known:
                self._known.add(path.worker_id)
                _log.info("reads from %s", path)
        return True


def _cancel_pulls(room: _Room | None) -> None:
    """Cancels a room's pulls. On return nothing writes its pages any more."""
    for pull in room.pulls if room else ():
        pull.cancel()
