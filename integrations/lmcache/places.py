# SPDX-License-Identifier: Apache-2.0
"""Keeps the pages that leases and reads use, and ends these before LMCache gives a page to another object.

`l1` calls `Places.freed` from LMCache's allocator. An owner's lease is aborted then, so that no reader validates what
it read. A reader's pull is cancelled, so that no byte arrives later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvlink.errors import Cancelled

from .pages import PageIds, Pages

T = TypeVar("T")


class Hold:
    """The use of some pages by one lease or one read. Thread-safe."""

    def __init__(self, pages: PageIds) -> None:
        self.pages = pages
        self._lock = threading.RLock()
        self._ended = False
        self._end: Callable[[], object] | None = None

    @property
    def ended(self) -> bool:
        """Whether `finish` was called: the pages may belong to other objects."""
        return self._ended

    def begin(self, start: Callable[[], T], end: Callable[[T], object]) -> T:
        """Calls `start`, whose result `finish` passes to `end`. Raises Cancelled if a page was freed before."""
        with self._lock:
            if self._ended:
                raise Cancelled("LMCache has freed the memory of an object before it was read")
            started = start()
            self._end = lambda: end(started)
            return started

    def finish(self) -> None:
        """Ends the use. On return nothing that `begin` has started accesses the pages. Raises what `end` raises."""
        with self._lock:
            self._ended = True
            if self._end is not None:
                self._end()
                self._end = None


class Places:
    """All holds on the pages of one memory. Thread-safe, and cheap for pages that nothing uses."""

    def __init__(self, pages: Pages) -> None:
        self._page_bytes = pages.page_bytes
        self._uses = np.zeros(pages.num_pages, np.uint32)
        self._freed = np.zeros(pages.num_pages, np.bool_)
        self._holds: set[Hold] = set()
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._holds)

    def hold(self, pages: PageIds) -> Hold:
        """Returns a hold on pages, which the caller releases. One that `freed` has ended is released already."""
        hold = Hold(np.unique(pages))
        with self._lock:
            self._holds.add(hold)
            self._uses[hold.pages] += 1
        return hold

    def release(self, hold: Hold) -> None:
        """Forgets a hold whose use has ended. Idempotent."""
        with self._lock:
            if hold in self._holds:
                self._holds.remove(hold)
                self._uses[hold.pages] -= 1

    def was_freed(self, pages: PageIds) -> bool:
        """Returns whether a page was freed since the start, so that it may have held more than one object."""
        return bool(self._freed[pages].any())

    def freed(self, offset: int, size: int) -> None:
        """Ends all uses of this memory, which is about to be freed. Raises what ending one of them raises."""
        begin, end = offset // self._page_bytes, -(-(offset + size) // self._page_bytes)
        with self._lock:
            self._freed[begin:end] = True
            if not self._uses[begin:end].any():
                return
            hit = [hold for hold in self._holds if ((hold.pages >= begin) & (hold.pages < end)).any()]
        for hold in hit:
            hold.finish()
            self.release(hold)
