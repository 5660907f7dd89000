# SPDX-License-Identifier: Apache-2.0
"""Moves what each rank of decode takes from each rank of prefill by bare calls, which is the limit of a migration.

The pieces are computed here, without the planner, and moved by csrc/bench/baselines.h, without the transports. Every
two ranks that share heads have a thread, and over sockets a stream; where there are only two ranks, also as many as
kvlink may use. The time is from the first call until the last has
returned.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

from kvlink import BlockPool, KVLayout
from kvlink.layout import assign
from kvlink.layout.kv_layout import common_layers

from ..harness.baselines import Copy, Memory, copies_from, memory_of, thread_counts
from ..harness.contents import Ids
from ..harness.pieces import End, pieces_of
from ..harness.processes import OwnerSide


class Owner(NamedTuple):
    """One rank of prefill."""

    side: OwnerSide
    layout: KVLayout


class Request(NamedTuple):
    """A request's blocks at every rank of prefill, and at every rank of decode."""

    request_id: str
    owner_ids: Ids
    ids: Ids
    tokens: int
    prefill: int = 0
    """Which of several prefills has it."""


class _Copies:
    """Copies by one rank of decode from the memory of one rank of prefill."""

    def __init__(
        self,
        owner: Owner,
        memory: Memory,
        copy: Copy,
        pool: BlockPool,
        heads: tuple[int, int],
    ) -> None:
        self._owner, self._memory, self._copy = owner, memory, copy
        self._pool, self._heads = pool, heads

    def prepare(self, request: Request) -> Callable[[], int]:
        """Returns a function that then copies, and returns ns."""
        layers = common_layers(self._owner.layout, self._pool.layout)
        owner = End(self._owner.layout, layers, request.owner_ids, self._memory.base)
        reader = End(self._pool.layout, layers, request.ids, self._pool.regions[0].address)
        return partial(self._copy, pieces_of(owner, reader, self._heads, request.tokens))


class Prepares(Protocol):
    """Bare calls that move a request."""

    def prepare(self, request: Request) -> Callable[[], int]:
        """Returns a function that then copies, and returns ns."""


class Baselines:
    """The bare ways of one path, by name. It is empty if there are none (verbs)."""

    def __init__(self, ways: Mapping[str, Sequence[Prepares]], threads: ThreadPoolExecutor) -> None:
        self._ways, self._threads = ways, threads
        self.names = list(ways)

    def run(self, name: str, request: Request) -> float:
        """Returns the microseconds of the copies; their lists are made before."""
        prepared = [each.prepare(request) for each in self._ways[name]]
        spans = list(self._threads.map(_span, prepared))
        return (max(end for _, end in spans) - min(start for start, _ in spans)) / 1000


@contextmanager
def baselines_between(
    transport: str, owners: Sequence[Owner], pools: Sequence[BlockPool]
) -> Iterator[Baselines]:
    """Opens the baselines between all ranks of prefill and of decode."""
    name = transport.removeprefix("fault+")
    ways: dict[str, list[_Copies]] = {}
    counts = thread_counts(1 << 30) if len(owners) == len(pools) == 1 else (1,)
    for owner in owners:
        memory = memory_of(name, owner.side)
        for pool in pools:
            if found := assign(pool.layout, owner.layout):
                for way, copy in copies_from(name, owner.side, counts).items():
                    ways.setdefault(way, []).append(_Copies(owner, memory, copy, pool, found.heads))
    with ThreadPoolExecutor(max(map(len, ways.values()), default=1)) as threads:
        yield Baselines(ways, threads)


def _span(bare: Callable[[], int]) -> tuple[int, int]:
    took = bare()
    end = time.perf_counter_ns()
    return end - took, end
