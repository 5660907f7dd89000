# SPDX-License-Identifier: Apache-2.0
"""Implements the encoder server's side: saves encoder outputs into the pool, and offers them under soft leases."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from typing import Protocol

from kvlink.errors import KVLinkError
from kvlink.ticket import Ticket

from .cache import EncoderCache, Entry
from .commands import Copy
from .items import Item

_log = logging.getLogger("vllm.kvlink")


class OffersSoftly(Protocol):
    """The part of a Worker that offers need."""

    def offer_soft(self, request_id: str, block_ids: array[int], /) -> Ticket:
        """Offers blocks without pinning them."""
        ...


class EncoderOffers:
    """Decides what the next step saves, and creates tickets. Not thread-safe."""

    def __init__(self, cache: EncoderCache, worker: OffersSoftly, counts: Counter[str]) -> None:
        self._cache = cache
        self._worker = worker
        self._counts = counts
        self._saves: dict[str, Entry] = {}

    def save(self, item: Item) -> None:
        """Lets the step that is being scheduled save an item that it encodes, or has in vLLM's own cache."""
        if not item.rows:
            return
        entry = self._cache.get(item.identifier)
        if entry is not None and (entry.ready or entry.pull is not None or entry.item != item):
            return
        if entry is None:
            entry = self._cache.add(item) if self._cache.fits(item) else None
        if entry is None:
            self._counts["no_room"] += 1
            return
        self._cache.writes(entry)
        self._saves[item.identifier] = entry

    def take_saves(self) -> list[Copy]:
        """Returns what the step that is sent now saves."""
        saves = [Copy.of(entry) for entry in self._saves.values()]
        self._saves.clear()
        return saves

    def collect(self) -> None:
        """Drops items that their step has not written: it did not compute them, or not in the expected shape."""
        for entry in self._cache.take_unwritten():
            self._counts["unsaved"] += 1
            _log.debug("encoder output not saved item=%s", entry.item.identifier)

    def ticket(self, item: Item) -> Ticket | None:
        """Returns a ticket of an item that is saved, and None for another."""
        entry = self._cache.get(item.identifier)
        if entry is None or not entry.ready or entry.item != item:
            return None
        if entry.ticket is None:
            try:
                entry.ticket = self._worker.offer_soft(item.ticket_name, entry.blocks)
            except KVLinkError as error:
                _log.warning("encoder output not offered item=%s error=%s", item.identifier, error)
                return None
            self._counts["offered"] += 1
        return entry.ticket
