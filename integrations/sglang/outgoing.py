# SPDX-License-Identifier: Apache-2.0
"""Prefill's side: the pages of rooms (requests between two servers), offered chunk by chunk as they are written."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvlink.errors import ConfigError, UnknownRequest
from kvlink.layout import assign, num_seats
from kvlink.sharding import Sharded as Reader
from kvlink.ticket import Ticket
from kvlink.types import LeaseEnd

from .caches import Cache


class Written(NamedTuple):
    """A chunk that is ready to be read. Indices are numpy arrays, or lists, of SGLang's.

    pages: of the KV cache. num_tokens: that they hold. states: items of each component, None for those without.
    """

    pages: Any
    num_tokens: int
    states: Sequence[Any | None]
    is_last: bool


@dataclass(slots=True)
class _Room:
    """`pinned` are the offers not yet settled, each with its cache."""

    pinned: dict[str, Cache] = field(default_factory=dict)
    all_offered: bool = False
    trace: str = ""
    """Of its first offer, as a `traceparent`; SGLang does not say which the request has."""


class Outgoing:
    """The offers of one scheduler process. Used on the scheduler's thread only; no call waits for anybody."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = caches
        self._rooms: dict[int, _Room] = {}
        self._room_of: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def offer(self, room: int, written: Written, readers: Sequence[Reader]) -> list[list[tuple[int, Ticket]]]:
        """Pins a chunk. Returns the tickets of each reader, with the indices of their caches. Raises ConfigError.

        On failure offers may have been made already: `end` the room.
        """
        state = self._rooms.setdefault(room, _Room())
        tickets: list[list[tuple[int, Ticket]]] = [[] for _ in readers]
        for index, cache in enumerate(self._caches):
            items = _items(cache, written)
            if not items:
                continue
            takers = _takers(cache, readers)
            if not takers:
                continue
            name = f"{room}/{next(self._numbers)}"
            num_tokens = written.num_tokens if cache.component is None else None
            ticket = cache.worker.offer(
                name, items, num_tokens=num_tokens, readers=len(takers), trace=state.trace
            )
            state.trace = state.trace or str(ticket.trace or "")
            state.pinned[name] = cache
            self._room_of[name] = room
            for taker in takers:
                tickets[taker].append((index, ticket))
        state.all_offered |= written.is_last
        return tickets

    def delivered(self, room: int) -> bool:
        """Whether all chunks were offered and every reader has settled every offer."""
        state = self._rooms.get(room)
        return state is not None and state.all_offered and not state.pinned

    def ended(self) -> Iterator[tuple[int, str]]:
        """Rooms of which an offer ended since the last call, and what went wrong; "" for an offer that was settled."""
        for cache in self._caches:
            for event in cache.worker.events():
                room = self._room_of.pop(event.request_id, None)
                if room is None:
                    continue
                del self._rooms[room].pinned[event.request_id]
                how = f"the lease of its pages {event.how.value} after {event.held_s:.1f} s"
                yield room, "" if event.how is LeaseEnd.SETTLED else how

    def end(self, room: int) -> None:
        """Ends what is still offered; a read under way turns stale, so the pages may be written. Idempotent."""
        state = self._rooms.pop(room, None)
        for name, cache in state.pinned.items() if state else ():
            del self._room_of[name]
            with suppress(UnknownRequest):  # ended already, and nobody has asked for the event yet
                cache.worker.abort(name)


def _items(cache: Cache, written: Written) -> array[int]:
    """Of this cache, in the form that `Worker.offer` takes fastest."""
    items = written.pages
    if cache.component is not None:
        items = written.states[cache.component] if cache.component < len(written.states) else None
    return array("I", b"" if items is None else np.asarray(items, dtype=np.uint32).tobytes())


def _takers(cache: Cache, readers: Sequence[Reader]) -> list[int]:
    """The readers that take a share of this cache from this rank. Raises ConfigError."""
    layout = cache.worker.pool.layout
    if cache.component is not None:
        return list(range(len(readers)))
    takers = [index for index, reader in enumerate(readers) if assign(reader, layout) is not None]
    expected = num_seats(layout, readers[0].tp_size) if readers else 0
    if len(takers) != expected:
        raise ConfigError(f"{len(takers)} decode ranks came for KV pages that {expected} have to read")
    return takers
