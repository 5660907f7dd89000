# SPDX-License-Identifier: Apache-2.0
"""Simulates which blocks a paged allocator gives out after a trace: the fragmentation of a cache in use.

Free blocks wait in a queue, as in vLLM's block pool with its prefix cache on. A request takes its prompt's blocks from
the head, and one more for each block of tokens that it generates. When it is done, its full blocks go to the tail, the
last one first; one that is not full goes back to the head. No prefix is found again, and no prompt comes in chunks.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from kvlink.errors import ConfigError

from ..harness.block_draws import Fragmentation, Order
from ..harness.contents import Ids
from .models import BLOCK_TOKENS
from .traces import Request, requests_of

TRACE, LIVE, TIMES = "azure-2023-conv", 16, 5
"""The defaults: the trace, how many requests live at a time, and how often the pool was given out before."""

_NAME = "allocator"
_NUMBER = re.compile("[1-9][0-9]{0,2}")
_REQUESTS = 4000  # of the trace, repeatedly
_MOST_STEPS = 8  # of the other requests between two lists


def order_of(text: str, blocks: int, trace: str = "") -> Fragmentation:
    """Parses "random", "runs:K" or "allocator:N:M": `trace`, N requests at a time, has used the whole pool M times.

    Raises ConfigError.
    """
    name, *numbers = text.split(":")
    if name != _NAME:
        return Order.parse(text, blocks)
    if len(numbers) > 2 or not all(map(_NUMBER.fullmatch, numbers)):
        raise ConfigError(f"order {text!r} is not known; write allocator:N:M with numbers of 1 to 999")
    live, times = [*map(int, numbers), *(LIVE, TIMES)[len(numbers) :]]
    return Replayed(requests_of(trace or TRACE, _REQUESTS), live, times)


class FreeBlocks:
    """The queue of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._queue = deque(range(num_blocks))

    def __len__(self) -> int:
        return len(self._queue)

    def take(self, num: int) -> list[int]:
        """Takes blocks from the head, which must have as many."""
        return [self._queue.popleft() for _ in range(num)]

    def give_back(self, ids: Sequence[int], full: int) -> None:
        """Returns one request's blocks, of which the first `full` are full."""
        self._queue.extendleft(reversed(ids[full:]))
        self._queue.extend(reversed(ids[:full]))


@dataclass(slots=True, eq=False)
class _Live:
    """A live request with `tokens` so far, and `last` in the end."""

    ids: list[int]
    tokens: int
    last: int


class Server:
    """A cache under a replayed trace: at most `live` requests at a time, with at most half of the blocks.

    Raises ConfigError if no request is that small.
    """

    def __init__(self, requests: Sequence[Request], num_blocks: int, live: int, first: int) -> None:
        self.free = FreeBlocks(num_blocks)
        self.handed_out = 0  # blocks so far
        self._num_blocks, self._most = num_blocks, live
        self._half = self._room = num_blocks // 2
        self._live: list[_Live] = []
        fitting = [each for each in requests if each.prompt_tokens and _whole(each) <= self._half]
        if not fitting:
            raise ConfigError(f"no request of this trace has room in half of a pool of {num_blocks} blocks")
        self._coming = islice(cycle(fitting), first % len(fitting), None)
        self._next = next(self._coming)

    def step(self) -> None:
        """Lets every request generate a block of tokens, and end when it has all; others start."""
        for each in [*self._live]:
            each.tokens = min(each.tokens + BLOCK_TOKENS, each.last)
            each.ids += self.take(_blocks(each.tokens) - len(each.ids))
            if each.tokens == each.last:
                self._end(each)
        while self._fits(self._next):
            prompt, output = self._next.prompt_tokens, self._next.output_tokens
            self._live.append(_Live(self.take(_blocks(prompt)), prompt, prompt + output))
            self._next = next(self._coming)

    def take(self, num: int) -> list[int]:
        """Takes blocks for a request."""
        self.handed_out += num
        return self.free.take(num)

    def leave(self, num: int) -> None:
        """Reserves blocks that no request of the trace gets from now on. The requests that came last end for it."""
        self._room = min(self._half, self._num_blocks - num)
        while self._reserved() > self._room:
            self._end(self._live[-1])

    def _reserved(self) -> int:
        return sum(_blocks(each.last) for each in self._live)

    def _fits(self, request: Request) -> bool:
        return len(self._live) < self._most and self._reserved() + _whole(request) <= self._room

    def _end(self, each: _Live) -> None:
        self._live.remove(each)
        self.free.give_back(each.ids, each.tokens // BLOCK_TOKENS)


class Replayed:
    """Lists from such servers, each some steps later than the previous; one server for each size of pool."""

    run = 1

    def __init__(self, requests: Sequence[Request], live: int, times: int) -> None:
        self._requests, self._most, self._times = requests, live, times
        self._servers: dict[int, Server] = {}

    def whole_runs(self, least: int) -> int:
        """Returns `least`: any number of blocks fits."""
        return least

    def lists_in(self, pool_blocks: int, blocks: int) -> int:
        """Returns how many lists `draw` can make. Half of a pool is for the replayed trace."""
        return max(1, pool_blocks // 2 // blocks)

    def draw(self, rng: np.random.Generator, pool_blocks: int, num: int, blocks: int) -> list[Ids]:
        """Returns `num` lists of `blocks` ids, all different."""
        server = self._servers.get(pool_blocks) or self._warm(rng, pool_blocks)
        server.leave(num * blocks)
        lists = []
        for _ in range(num):
            for _ in range(rng.integers(1, _MOST_STEPS, endpoint=True)):
                server.step()
            lists.append(server.take(blocks))
        for ids in lists:
            server.free.give_back(ids, blocks)
        return [np.array(ids, np.uint32) for ids in lists]

    def _warm(self, rng: np.random.Generator, pool_blocks: int) -> Server:
        server = Server(self._requests, pool_blocks, self._most, int(rng.integers(len(self._requests))))
        while server.handed_out < self._times * pool_blocks:
            server.step()
        return self._servers.setdefault(pool_blocks, server)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def _whole(request: Request) -> int:
    return _blocks(request.prompt_tokens + request.output_tokens)
