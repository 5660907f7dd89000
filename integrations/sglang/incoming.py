# SPDX-License-Identifier: Apache-2.0
"""Implements decode's side: it pulls the pages of each room as prefill announces them."""

from __future__ import annotations

import logging
import secrets
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
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
    chunks: dict[tuple[int, int, int], Chunk] = field(default_factory=dict)
    """The chunks that have arrived, by prefill rank, first page and number of pages."""
    pages_of: Counter[int] = field(default_factory=Counter)
    """The pages that each prefill rank has written."""
    pages_read: Counter[tuple[int, int]] = field(default_factory=Counter)
    """The pages for which each prefill rank gave tickets, by rank and cache."""
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
        self._abandoned: deque[tuple[int, int]] = deque()

    def expect(self, room: int, pages: Any, states: Sequence[Any | None], num_ranks: int) -> None:
        """Prepares for the chunks of `num_ranks` prefill ranks. From now on the pages may be written.

        Raises ConfigError for a room whose earlier request still waits for its pages: the two would be confused.
        """
        self._drop_abandoned()
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

    def is_running(self, room: int, generation: int) -> bool:
        """Returns whether this attempt is the one that waits for pages."""
        with self._lock:
            return self._attempt(room, generation) is not None

    def arrived(self, chunk: Chunk) -> None:
        """Starts to read a chunk. Chunks of an unknown room or an earlier attempt are dropped, and a repeated one too.

        An error of any kind fails the room: `poll` raises it.
        """
        with self._lock:
            room = self._attempt(chunk.room, chunk.generation)
            if room is None or room.error is not None:
                return
            try:
                self._start(room, chunk)
            except KVLinkError as error:
                room.error = error
            except Exception as error:
                _log.exception("a chunk of bootstrap_room %d failed, and the others go on", chunk.room)
                room.error = KVLinkError(f"a chunk cannot be read: {type(error).__name__}: {error}")

    def refuse(self, room_id: int, generation: int, error: KVLinkError) -> None:
        """Fails the attempt that a message which cannot be read is about. Other rooms go on."""
        with self._lock:
            room = self._attempt(room_id, generation)
            if room is not None:
                room.error = room.error or error

    def _attempt(self, room_id: int, generation: int) -> _Room | None:
        room = self._rooms.get(room_id)
        return room if room is not None and room.generation == generation else None

    def poll(self, room_id: int) -> tuple[bytes, ...] | None:
        """Returns the rows of the metadata buffers once all bytes are valid in place, until then None. Never waits.

        Raises KVLinkError if the room failed: the caller must `drop` it.
        """
        self._drop_abandoned()
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

    def drop(self, room_id: int, generation: int | None = None) -> None:
        """Forgets a room, or only this attempt at it. On return nothing writes its pages any more. Idempotent."""
        with self._lock:
            room = self._rooms.get(room_id)
            if room is None or generation not in (None, room.generation):
                return
            del self._rooms[room_id]
        _cancel_pulls(room)

    def abandon(self, room_id: int, generation: int) -> None:
        """Has this attempt dropped by the next call of `expect` or `poll`. A garbage collection may call it."""
        self._abandoned.append((room_id, generation))

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            self.drop(*self._abandoned.popleft())

    def num_rooms(self) -> int:
        """Returns how many rooms have pages that may be written."""
        return len(self._rooms)

    def _complete(self, room: _Room) -> bool:
        """Returns whether all bytes are in place. Raises KVLinkError if the room failed."""
        if room.error is not None:
            raise room.error
        room.pulls = [pull for pull in room.pulls if not self._landed(pull)]
        if room.pulls or len(room.complete) < room.num_ranks:
            return False
        # The last chunk may arrive before another.
        if any(room.pages_of[rank] != len(room.pages) for rank in room.complete):
            return False
        self._check_nothing_is_missing(room)
        return True

    def _check_nothing_is_missing(self, room: _Room) -> None:
        """Raises ConfigError if a cache got no bytes: prefill has other caches than this server."""
        for index, cache in enumerate(self._caches):
            needed = len(room.pages) if cache.component is None else len(_items_of(cache, room, 0, 0))
            read = [room.pages_read[rank, index] for rank in room.complete]
            if cache.component is None and any(count not in (0, needed) for count in read):
                raise ConfigError(f"prefill offered {read} of {needed} pages of cache {index}")
            if needed and not any(read) and room.num_ranks:
                raise ConfigError(
                    f"prefill offered nothing of cache {index}; start the same model on both servers"
                )

    def _start(self, room: _Room, chunk: Chunk) -> None:
        place = (chunk.prefill_rank, chunk.first_page, chunk.num_pages)
        if room.chunks.get(place) == chunk:
            return
        self._check(room, chunk)
        end = chunk.first_page + chunk.num_pages
        for index, ticket in chunk.tickets:
            cache = self._caches[index]
            into = _items_of(cache, room, chunk.first_page, end)
            if len(into) != len(ticket.block_ids):
                raise ConfigError(
                    f"prefill offers {len(ticket.block_ids)} items of cache {index}, decode has {len(into)}"
                )
            room.pulls.append(cache.worker.pull(ticket, np.asarray(into, dtype=np.uint32), partial=True))
            room.pages_read[chunk.prefill_rank, index] += len(into)
        room.chunks[place] = chunk
        room.pages_of[chunk.prefill_rank] += chunk.num_pages
        if chunk.is_last:
            room.complete.add(chunk.prefill_rank)
            room.aux = room.aux or chunk.aux

    def _check(self, room: _Room, chunk: Chunk) -> None:
        """Raises ConfigError for a chunk that cannot be one of this room's."""
        end, rank = chunk.first_page + chunk.num_pages, chunk.prefill_rank
        if chunk.num_caches != len(self._caches):
            raise ConfigError(
                f"prefill has {chunk.num_caches} groups of caches and decode has {len(self._caches)}; start the same "
                "model with the same flags on both servers"
            )
        if end > len(room.pages):
            raise ConfigError(f"prefill wrote pages up to {end} and decode has {len(room.pages)}")
        if _overlaps(room, chunk):
            raise ConfigError(f"prefill rank {rank} wrote pages {chunk.first_page} to {end} twice")
        if rank not in room.pages_of and len(room.pages_of) >= room.num_ranks:
            raise ConfigError(f"chunks came from more than {room.num_ranks} prefill ranks")

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


def _overlaps(room: _Room, chunk: Chunk) -> bool:
    end = chunk.first_page + chunk.num_pages
    return any(
        rank == chunk.prefill_rank and first < end and chunk.first_page < first + count
        for rank, first, count in room.chunks
    )


def _items_of(cache: Cache, room: _Room, first_page: int, end: int) -> Any:
    """Returns the room's items of a cache: some of its pages, or all items of a state."""
    if cache.component is None:
        return room.pages[first_page:end]
    states = room.states[cache.component] if cache.component < len(room.states) else None
    return () if states is None else states


def _cancel_pulls(room: _Room | None) -> None:
    """Cancels a room's pulls. On return nothing writes its pages any more."""
    with ExitStack() as pulls:
        for pull in room.pulls if room else ():
            pulls.callback(pull.cancel)
