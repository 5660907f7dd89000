# SPDX-License-Identifier: Apache-2.0
"""Moves requests of models with several kinds of caches: each kind is a cache group with blocks and rows of its own.

One rank's share moves to an equal. The limit has bare calls that move the pieces of all kinds, which are computed here
without the planner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from kvlink import BlockPool, KVLayout, Worker
from kvlink.errors import ConfigError

from ..harness.baselines import Copy, Memory, copies_from, memory_of, thread_counts
from ..harness.block_draws import Order
from ..harness.contents import Contents, Ids
from ..harness.owner import stacked
from ..harness.pieces import End, pieces_of
from ..harness.processes import OwnerSide, coordinator_process, owner_process
from ..workloads.grouped_models import GROUPED_MODELS, CacheRows
from .rank_handoffs import SEED, Bench, Row
from .rank_shares import Baselines, Request

_POOL_BYTES = 1 << 30
_PLACES = 4
"""Requests that a pool has room for, if they fit: fresh blocks each time."""
_RUN_BYTES, _LEAST_ITERS, _MOST_ITERS = 8 << 30, 16, 200


def rows(
    name: str, tokens: int, transport: str, tp: str, iters: int | None, order: str, prefill_ms: float
) -> Iterator[Row]:
    """Yields the row of the first handoffs, and then the measured row, as `migrate.rows` does."""
    if not tp.isdecimal() or not int(tp):
        raise ConfigError(f"TP {tp!r} is not known; write 8 for one rank's share of {name}")
    kinds = [kind for kind in GROUPED_MODELS[name].groups if kind.rows(tokens)]
    one = [kind.geometry(name, int(tp), kind.blocks(tokens)) for kind in kinds]
    request_bytes = sum(layout.block_bytes * layout.num_blocks for layout in stacked(one))
    places = max(1, min(_PLACES, _POOL_BYTES // request_bytes))
    geometries = [
        kind.geometry(name, int(tp), places * geometry.num_blocks)
        for kind, geometry in zip(kinds, one, strict=True)
    ]
    layouts, here = stacked(geometries), transport.endswith("loopback")
    with (
        coordinator_process() as coordinator,
        owner_process(geometries, SEED, transport, coordinator, here=here) as owner,
        Worker(
            BlockPool.allocate(layouts), "bench-reader", coordinator=coordinator, transports=transport
        ) as worker,
        ThreadPoolExecutor(1) as threads,
    ):
        bench = GroupBench(owner, worker, kinds, tokens, Order.parse(order, 1 << 20))
        baselines = _baselines(transport, owner, worker.pool, bench.pieces, threads)
        common: Row = {
            "model": name, "tp": tp, "pp": "1:1", "block_tokens": 0, "transport": transport, "order": order,
            "layout": "NHD", "prefills": 1, "groups": len(layouts),
        }  # fmt: skip
        yield {"kind": "cold", **common, "tokens": tokens, **bench.warm_up(baselines)}
        iters = iters or max(_LEAST_ITERS, min(_RUN_BYTES // request_bytes, _MOST_ITERS))
        common |= {"slots": 1, **bench.run(iters, baselines), **bench.claim_parts(coordinator)}
        yield common | bench.row(prefill_ms * 1e3)


class GroupBench(Bench):
    """Hands off requests of one length. The ids of a request are those of its groups, one after the other."""

    def __init__(
        self, owner: OwnerSide, worker: Worker, kinds: Sequence[CacheRows], tokens: int, order: Order
    ) -> None:
        self._prefills, self._workers = [[(owner, 1)]], [worker]
        self._lengths, self._order = [tokens], order
        self._asking = threading.Lock()
        self._layouts: Sequence[KVLayout] = worker.pool.groups
        self._rows = [kind.rows(tokens) for kind in kinds]
        self._ends = np.cumsum([kind.blocks(tokens) for kind in kinds])
        self._by_group = [Contents(layout, SEED + number) for number, layout in enumerate(self._layouts)]
        self._num_blocks = 0  # every group has its own number
        self._rng = np.random.default_rng(SEED)
        self._names = count()
        self._forget()

    def pieces(self, request: Request, from_base: int, to_base: int) -> Any:
        """Returns the rows of from address, to address and bytes of all groups."""
        every = zip(
            self._layouts, self._split(request.owner_ids), self._split(request.ids), self._rows, strict=True
        )
        found = [
            pieces_of(
                End(layout, layout.layers, owner_ids, from_base),
                End(layout, layout.layers, ids, to_base),
                (0, layout.num_heads),
                held,
            )
            for layout, owner_ids, ids, held in every
        ]
        return np.ascontiguousarray(np.concatenate(found))

    def _split(self, ids: Ids) -> list[Ids]:
        return np.split(ids, self._ends[:-1])

    def _draw(self, tokens: int, within: int, request_id: str = "", prefill: int = 0) -> Request:
        sizes = np.diff(self._ends, prepend=0).tolist()
        drawn = [
            [
                self._order.draw(self._rng, layout.num_blocks, [size])[0]
                for layout, size in zip(self._layouts, sizes, strict=True)
            ]
            for _ in range(2)
        ]
        return Request(request_id, np.concatenate(drawn[0]), np.concatenate(drawn[1]), tokens, prefill)

    def _offered(self, request: Request) -> tuple[Any, Any]:
        return [ids.tolist() for ids in self._split(request.owner_ids)], self._rows

    def _into(self, request: Request) -> Any:
        return self._split(request.ids)

    def _poison(self, ids: Ids) -> None:
        for contents, each in zip(self._by_group, self._split(ids), strict=True):
            contents.poison(self._workers[0].pool, each)

    def _landed(self, request: Request) -> bool:
        every = zip(
            self._by_group, self._split(request.ids), self._split(request.owner_ids), self._rows, strict=True
        )
        return all(
            contents.equal(self._workers[0].pool, ids, owner_ids, held)
            for contents, ids, owner_ids, held in every
        )


class _GroupCopies:
    """Copies of all groups from the memory of the owner."""

    def __init__(
        self, memory: Memory, copy: Copy, pool: BlockPool, pieces: Callable[[Request, int, int], Any]
    ) -> None:
        self._memory, self._copy, self._pool, self._pieces = memory, copy, pool, pieces

    def prepare(self, request: Request) -> Callable[[], int]:
        """Returns a function that then copies, and returns ns."""
        pieces = self._pieces(request, self._memory.base, self._pool.regions[0].address)
        return partial(self._copy, pieces)


def _baselines(
    transport: str,
    owner: OwnerSide,
    pool: BlockPool,
    pieces: Callable[[Request, int, int], Any],
    threads: ThreadPoolExecutor,
) -> Baselines:
    name = transport.removeprefix("fault+")
    memory = memory_of(name, owner)
    copies = copies_from(name, owner, thread_counts(1 << 30))
    return Baselines(
        {way: [_GroupCopies(memory, copy, pool, pieces)] for way, copy in copies.items()}, threads
    )
