# SPDX-License-Identifier: Apache-2.0
"""Implements prefill's side: it offers the pages of rooms (requests between two servers) chunk by chunk."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvlink.errors import ConfigError, UnknownRequest
from kvlink.layout import Share, assign, num_seats
from kvlink.layout.sharding import TensorParallel as Reader
from kvlink.ticket import Ticket
from kvlink.types import LeaseEnd

from .caches import Cache


class Written(NamedTuple):
    """A chunk that is ready to be read. Indices are SGLang's, as numpy arrays or lists.

    `pages` are those of the KV cache, with `num_tokens` tokens. `states` has the items of each component, or None.
    """

    pages: Any
    num_tokens: int
    states: Sequence[Any | None]
    is_last: bool


@dataclass(slots=True)
class _Room:
    """A room with its offers that are not yet settled (`pinned`), each with its cache."""

    pinned: dict[str, Cache] = field(default_factory=dict)
    all_offered: bool = False
    trace: str = ""
    """The `traceparent` of its first offer. SGLang does not pass on that of the request."""


class Outgoing:
    """The offers of a scheduler process. Only the scheduler's thread uses it, and no call waits."""

    def __init__(self, caches: Sequence[Cache]) -> None:
        self._caches = caches
        self._rooms: dict[int, _Room] = {}
        self._room_of: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def offer(self, room: int, written: Written, readers: Sequence[Reader]) -> list[list[tuple[int, Ticket]]]:
        """Pins a chunk. Returns the tickets of each reader, with the indices of their caches. Raises ConfigError.

        On failure some offers may exist already: the caller must `end` the room.
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
        """Returns whether all chunks were offered and every reader has settled every offer."""
        state = self._rooms.get(room)
        return state is not None and state.all_offered and not state.pinned

    def ended(self) -> Iterator[tuple[int, str]]:
        """Yields rooms of which an offer ended since the last call, with the error, or "" for a settled offer."""
        for cache in self._caches:
            for event in cache.worker.events():
                room = self._room_of.pop(event.request_id, None)
                if room is None:
                    continue
                if (state := self._rooms.get(room)) is not None:
                    state.pinned.pop(event.request_id, None)
                how = f"the lease of its pages {event.how.value} after {event.held_s:.1f} s"
                yield room, "" if event.how is LeaseEnd.SETTLED else how

    def end(self, room: int) -> None:
        """Ends the active offers. A read in progress becomes stale, so the pages may be written. Idempotent.

        After an error the others are ended all the same, and the error is raised.
        """
        state = self._rooms.pop(room, None)
        with ExitStack() as offers:
            for name, cache in state.pinned.items() if state else ():
                self._room_of.pop(name, None)
                offers.callback(_end, cache, name)


def _end(cache: Cache, name: str) -> None:
    with suppress(UnknownRequest):  # it has ended, and its event is not read yet
        cache.worker.abort(name)


def _items(cache: Cache, written: Written) -> array[int]:
    """Returns the items of this cache, in the form that `Worker.offer` takes fastest."""
    items = written.pages
    if cache.component is not None:
        items = written.states[cache.component] if cache.component < len(written.states) else None
    return array("I", b"" if items is None else np.asarray(items, dtype=np.uint32).tobytes())


def _takers(cache: Cache, readers: Sequence[Reader]) -> list[int]:
    """Returns the readers that read a share of this cache from this rank. Raises ConfigError."""
    layout = cache.worker.pool.layout
    if cache.component is not None:
        return list(range(len(readers)))
    shares = [Share(reader.total_heads, reader.tp_rank, reader.tp_size) for reader in readers]
    takers = [index for index, share in enumerate(shares) if assign(share, layout) is not None]
    expected = num_seats(layout, readers[0].tp_size) if readers else 0
    if len(takers) != expected:
        raise ConfigError(f"{len(takers)} decode ranks asked for KV pages that {expected} must read")
    return takers
