# SPDX-License-Identifier: Apache-2.0
"""An owner of a soak: offers requests in all ways, and gives their blocks to others as soon as they come back."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from soak.contents import BLOCK_TOKENS, MAX_REQUESTS, NOBODY, layout, words_of, written
from soak.messages import Abort, AtRest, Finish, Offered

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.errors import UnknownRequest

_NUM_BLOCKS = 1024
MAX_BLOCKS = 96
"""Bounds the blocks of one request."""
_MAX_LIVE = 48
_LONG_S, _REST_S = 120.0, 15.0
_SHARE_OF_SHORT, _SHARE_OF_ABORTS = 0.04, 0.04


class _Kernel:
    """Stands for work of a device: has passed once its blocks are written."""

    def __init__(self) -> None:
        self.has_passed = False

    def query(self) -> bool:
        return self.has_passed


class Owner:
    """Lives in one thread."""

    def __init__(self, pipe: Connection, name: str, number: int, transports: str, seed: int) -> None:
        self._pipe, self._number = pipe, number
        self._random = random.Random(seed)
        pool = BlockPool.allocate(layout(_NUM_BLOCKS), huge_pages=False)
        self._words = words_of(pool)
        self._worker = Worker(pool, name, config=WorkerConfig(transports=transports))
        self._free = list(range(_NUM_BLOCKS))
        self._blocks: dict[int, list[int]] = {}
        """Holds the blocks of each live request."""
        self._requests = itertools.count(NOBODY + 1)
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Until it is told to finish."""
        while not self._told_to_finish():
            self._collect()
            self._do_what_is_due()
            if len(self._blocks) < _MAX_LIVE and len(self._free) > MAX_BLOCKS:
                self._offer()
            else:
                time.sleep(0.001)
        self._pipe.send(AtRest(self._held_at_rest()))
        self._worker.close()

    def _told_to_finish(self) -> bool:
        while self._pipe.poll():
            message = self._pipe.recv()
            if isinstance(message, Finish):
                return True
            if isinstance(message, Abort):
                self._abort(message.request)
        return False

    def _collect(self) -> None:
        for event in self._worker.events():
            blocks = self._blocks.pop(int(event.request_id))
            self._words[blocks] = written(
                self._number, NOBODY, 0, len(blocks)
            )  # at once: they are its own again
            self._free += blocks

    def _offer(self) -> None:
        request = next(self._requests) % MAX_REQUESTS or NOBODY + 1
        count = self._random.choice((1, 2, 5, 17, 40, MAX_BLOCKS))
        self._random.shuffle(self._free) if self._random.random() < 0.1 else None
        blocks, self._free = self._free[:count], self._free[count:]
        self._blocks[request] = blocks
        is_short, is_aborted = (
            self._random.random() < share for share in (_SHARE_OF_SHORT, _SHARE_OF_ABORTS)
        )
        ttl_s = self._random.uniform(0.01, 0.3) if is_short else _LONG_S
        how = self._random.choice((self._written_before, self._written_before, self._streamed, self._after))
        ticket = how(request, blocks, ttl_s)
        if is_aborted:
            self._in(self._random.uniform(0.0, 0.02), lambda: self._abort(request))
        self._pipe.send(Offered(self._number, request, ticket, count, is_short or is_aborted))

    def _written_before(self, request: int, blocks: list[int], ttl_s: float) -> str:
        self._write(request, blocks, 0, len(blocks))
        return self._worker.offer(str(request), blocks, ttl_s=ttl_s).to_text()

    def _streamed(self, request: int, blocks: list[int], ttl_s: float) -> str:
        ticket = self._worker.offer(str(request), blocks, ttl_s=ttl_s, ready=0)
        step = self._random.randint(1, len(blocks))

        def go_on(done: int) -> None:
            if self._blocks.get(request) is not blocks:
                return
            end = min(done + step, len(blocks))
            self._write(request, blocks, done, end)
            try:
                self._worker.set_ready(str(request), end)
            except UnknownRequest:
                return  # it has ended: an ordinary race
            if end < len(blocks):
                self._in(self._random.uniform(0.0, 0.01), lambda: go_on(end))

        self._in(0.0, lambda: go_on(0))
        return ticket.to_text()

    def _after(self, request: int, blocks: list[int], ttl_s: float) -> str:
        kernel = _Kernel()
        ticket = self._worker.offer(str(request), blocks, ttl_s=ttl_s, after=kernel)

        def finish() -> None:
            if self._blocks.get(request) is blocks:
                self._write(request, blocks, 0, len(blocks))
            kernel.has_passed = True

        self._in(self._random.uniform(0.0, 0.02), finish)
        return ticket.to_text()

    def _write(self, request: int, blocks: list[int], first: int, end: int) -> None:
        self._words[blocks[first:end]] = written(self._number, request, first, end - first)

    def _abort(self, request: int) -> None:
        try:
            self._worker.abort(str(request))
        except UnknownRequest:
            return  # it has ended

    def _in(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), do))

    def _do_what_is_due(self) -> None:
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()

    def _held_at_rest(self) -> dict[str, int]:
        """Returns what is held although every offer was ended."""
        for request in list(self._blocks):
            self._abort(request)
        until = time.monotonic() + _REST_S
        while (self._blocks or self._worker.lease_counts().active) and time.monotonic() < until:
            self._collect()
            self._do_what_is_due()
            time.sleep(0.01)
        return {"leases": self._worker.lease_counts().active, "blocks": _NUM_BLOCKS - len(self._free)}


def tokens(first: int, num_blocks: int) -> tuple[int, int]:
    """Returns the range of tokens in these blocks."""
    return first * BLOCK_TOKENS, (first + num_blocks) * BLOCK_TOKENS
