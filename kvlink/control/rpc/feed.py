# SPDX-License-Identifier: Apache-2.0
"""Queues items for one consumer of a stream, up to a bound."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Queues items for one consumer, which iterates to receive them. Belongs to one event loop; `put` never blocks."""

    def __init__(self, limit: int, on_close: Callable[[], None] = lambda: None) -> None:
        self._items: deque[T] = deque()
        self._limit = limit
        self._on_close = on_close
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._closed = False

    def put(self, item: T) -> bool:
        """Queues an item. Returns False, without queueing, if the consumer has fallen behind or is gone."""
        if self._closed or len(self._items) >= self._limit:
            return False
        self._items.append(item)
        self._wake.set()
        return True

    def drain(self) -> list[T]:
        """Removes and returns all queued items."""
        items = list(self._items)
        self._items.clear()
        return items

    def close(self, error: Exception | None = None) -> None:
        """Ends the feed. The consumer gets what is queued, then `error` or the end. Closing again has no effect."""
        if not self._closed:
            self._closed, self._error = True, error
            self._wake.set()
            self._on_close()

    def __len__(self) -> int:
        """Returns the number of items that the consumer has yet to take."""
        return len(self._items)

    def __aiter__(self) -> Feed[T]:
        return self

    async def __anext__(self) -> T:
        while not self._items:
            if self._closed:
                raise self._error or StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._items.popleft()


async def merged(feed: Feed[list[T]]) -> AsyncIterator[list[T]]:
    """Yields everything that was queued while the consumer was busy, as one list."""
    async for items in feed:
        yield [*items, *itertools.chain.from_iterable(feed.drain())]
