# SPDX-License-Identifier: Apache-2.0
"""Implements the bounded cache of encoder outputs in the scheduler's process: which blocks hold which item.

Readers at other servers hold soft leases, which pin nothing: before a block gets new content, its leases are revoked.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Protocol

from kvlink.ticket import Ticket
from kvlink.transfer.pull import Pull

from .items import Item
from .memory import EncoderMemory


class Revokes(Protocol):
    """The part of a Worker that the cache needs."""

    def revoke(self, block_ids: array[int]) -> int:
        """Ends the soft offers that cover one of these blocks."""
        ...


@dataclass(slots=True)
class Entry:
    """An item that has blocks. `ready` says whether they hold it."""

    item: Item
    blocks: array[int]
    ready: bool = False
    written_by: int = 0
    """The step that writes the blocks, 0 for none."""
    busy_until: int = 0
    """The last step that reads or writes the blocks."""
    pull: Pull | None = None
    puller: str = ""
    """The request that started the pull."""
    wanted: set[str] = field(default_factory=set)
    """Requests that wait for the item, or for others beside it."""
    ticket: Ticket | None = None


class EncoderCache:
    """Keeps the least recently used items until others need their blocks. Not thread-safe."""

    def __init__(self, memory: EncoderMemory, worker: Revokes) -> None:
        self._memory = memory
        self._worker = worker
        self._free = list(range(memory.shape.num_blocks - 1, -1, -1))
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._written: dict[str, Entry] = {}  # by steps that may not have ended
        self.step = 0
        """The number of the last step that was sent to the workers."""

    def get(self, identifier: str) -> Entry | None:
        """Returns the entry of an item and counts it as used. Looks whether a step has written it."""
        entry = self._entries.get(identifier)
        if entry is None:
            return None
        self._entries.move_to_end(identifier)
        self._look(entry)
        return entry

    def fits(self, item: Item) -> bool:
        """Returns whether the pool is large enough for the item, whatever it holds now."""
        return self._num_blocks(item) <= self._memory.shape.num_blocks

    def add(self, item: Item) -> Entry | None:
        """Gives blocks to an item, whose old content is no longer offered. None if too many blocks are in use."""
        needed = self._num_blocks(item)
        evicted: list[Entry] = []
        num_free, done = len(self._free), self._done()
        for entry in self._entries.values():
            if num_free >= needed:
                break
            if not entry.wanted and entry.pull is None and entry.busy_until <= done:
                evicted.append(entry)
                num_free += len(entry.blocks)
        if num_free < needed:
            return None
        for entry in evicted:
            self.drop(entry)
        added = Entry(item, array("I", [self._free.pop() for _ in range(needed)]))
        self._entries[item.identifier] = added
        return added

    def drop(self, entry: Entry) -> None:
        """Takes the blocks back. On return no reader accepts or, over tcp, gets what they will hold next."""
        self._worker.revoke(entry.blocks)
        del self._entries[entry.item.identifier]
        self._written.pop(entry.item.identifier, None)
        self._free.extend(entry.blocks)

    def sent(self) -> int:
        """Numbers the step that is sent to the workers now, and returns its number."""
        self.step += 1
        return self.step

    def writes(self, entry: Entry) -> None:
        """Registers that the step that is being scheduled writes the blocks of an entry."""
        entry.written_by = entry.busy_until = self.step + 1
        self._written[entry.item.identifier] = entry

    def take_unwritten(self) -> list[Entry]:
        """Drops and returns the entries whose step has ended without writing them."""
        ended = [entry for entry in self._written.values() if entry.busy_until <= self._done()]
        for entry in ended:
            self._look(entry)
            del self._written[entry.item.identifier]
        lost = [entry for entry in ended if not entry.ready]
        for entry in lost:
            self.drop(entry)
        return lost

    def _look(self, entry: Entry) -> None:
        if entry.written_by and not entry.ready:
            entry.ready = int(self._memory.stamps[entry.blocks[0]]) == entry.written_by

    def _done(self) -> int:
        return int(self._memory.steps.min())

    def _num_blocks(self, item: Item) -> int:
        return -(-item.num_bytes // self._memory.shape.block_bytes)
