# SPDX-License-Identifier: Apache-2.0
"""SGLang's buffers as kvlink pools: one Worker for each group of equally shaped buffers.

SGLang lists its buffers as addresses: K of every layer, then V of every layer, and apart from them the state
buffers (sliding window, Mamba, …). In each the unit of a handoff is an item of fixed size: a page of the KV cache,
a slot or a page of a state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.layout import KVLayout, Plane, heads_of
from kvlink.transfer.pool import BlockPool, Region
from kvlink.worker import Worker


class Buffers(NamedTuple):
    """Buffers whose items have one size, as SGLang lists them."""

    addresses: tuple[int, ...]
    num_bytes: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One scheduler process. `total_heads`: KV heads of the whole model, 1 for MLA."""

    name: str
    """Unique in the deployment and the same after a restart."""
    model: str
    dtype: str
    page_tokens: int
    total_heads: int
    tp_rank: int
    tp_size: int
    gpu: int | None = None
    number: int = 0
    """Its place among the server's processes, data-parallel ranks included, from 0 on."""


class Cache(NamedTuple):
    """A group of buffers and the worker that lends it. `component`: of the state it is part of; None: KV pages."""

    component: int | None
    worker: Worker


def grouped(
    addresses: Sequence[int], num_bytes: Sequence[int], item_bytes: Sequence[int], what: str
) -> list[Buffers]:
    """Buffers by the size of their items, in the order of their first ones. Raises ConfigError."""
    if not len(addresses) == len(num_bytes) == len(item_bytes):
        raise ConfigError(
            f"{what}: {len(addresses)} addresses, {len(num_bytes)} lengths, {len(item_bytes)} item lengths"
        )
    groups: dict[int, list[tuple[int, int]]] = {}
    for address, length, item in zip(addresses, num_bytes, item_bytes, strict=True):
        if not address or not 0 < item <= length:
            raise ConfigError(
                f"{what}: a buffer of {length} bytes at {address:#x} has no items of {item} bytes"
            )
        groups.setdefault(item, []).append((address, length))
    return [
        Buffers(tuple(address for address, _ in rows), tuple(length for _, length in rows), item)
        for item, rows in groups.items()
    ]


def page_layout(buffers: Buffers, rank: Rank) -> KVLayout:
    """Pages of tokens of heads: ranks of another tensor-parallel degree can read a part of each. Raises ConfigError."""
    first, end = heads_of(rank.total_heads, rank.tp_rank, rank.tp_size)
    row_bytes, rest = divmod(buffers.item_bytes, rank.page_tokens * (end - first))
    if rest:
        raise ConfigError(
            f"KV pages of {buffers.item_bytes} bytes are not {rank.page_tokens} tokens of {end - first} heads"
        )
    return KVLayout(
        model=rank.model,
        dtype=rank.dtype,
        block_tokens=rank.page_tokens,
        total_heads=rank.total_heads,
        first_head=first,
        num_heads=end - first,
        row_bytes=row_bytes,
        block_stride=buffers.item_bytes,
        token_stride=(end - first) * row_bytes,
        head_stride=row_bytes,
        num_blocks=min(buffers.num_bytes) // buffers.item_bytes,
        planes=tuple(Plane(region=index, layer=index, offset=0) for index in range(len(buffers.addresses))),
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
    )


def item_layout(buffers: Buffers, rank: Rank, kind: str) -> KVLayout:
    """Items of a state, whose inside is not known: read whole, by ranks of the same tensor-parallel degree only."""
    what = f"{kind} of tp_size {rank.tp_size}"
    alone = replace(rank, dtype=what, page_tokens=1, total_heads=1, tp_rank=0, tp_size=1)
    return page_layout(buffers, alone)


def open_caches(
    kv: Sequence[Buffers], states: Sequence[tuple[str, Sequence[Buffers]]], rank: Rank, config: WorkerConfig
) -> list[Cache]:
    """Lends them; `close` of each worker takes them back. `states`: kind and buffers of each component.

    Peers find each other's caches by their place in this list. Given ports are those of the first rank's first one,
    each further cache, then each further rank, takes the next. Raises ConfigError.
    """
    layouts: list[tuple[int | None, Buffers, KVLayout]] = [
        (None, buffers, page_layout(buffers, rank)) for buffers in kv
    ]
    layouts += [
        (component, buffers, item_layout(buffers, rank, kind))
        for component, (kind, groups) in enumerate(states)
        for buffers in groups
    ]
    caches: list[Cache] = []
    with ExitStack() as opened:
        for index, (component, buffers, layout) in enumerate(layouts):
            ports = config.of_worker(rank.number * len(layouts) + index)
            worker = Worker(_pool(buffers, layout, rank.gpu), f"{rank.name}/{index}", config=ports)
            opened.callback(worker.close)
            caches.append(Cache(component, worker))
        opened.pop_all()
    return caches


def _pool(buffers: Buffers, layout: KVLayout, gpu: int | None) -> BlockPool:
    """SGLang's scheduler owns the memory, and outlives the pool."""
    regions = [
        Region(address, length, None, None, gpu)
        for address, length in zip(buffers.addresses, buffers.num_bytes, strict=True)
    ]
    return BlockPool(regions, layout)


class AuxRows:
    """SGLang's metadata buffers: a row of each belongs to a request, with its first token, log-probabilities, …

    They are in host memory and small, and travel inside a message.
    """

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        self._buffers = list(zip(addresses, row_bytes, strict=True))

    def read(self, index: int) -> tuple[bytes, ...]:
        """Copies a request's rows."""
        return tuple(ctypes.string_at(address + index * size, size) for address, size in self._buffers)

    def write(self, index: int, rows: Sequence[bytes]) -> None:
        """Stores the rows of the other server. Raises ConfigError when its buffers differ."""
        theirs, ours = [len(row) for row in rows], [size for _, size in self._buffers]
        if theirs != ours:
            raise ConfigError(
                f"metadata rows of {theirs} bytes came, here they have {ours}; start both servers with the same flags"
            )
        for (address, size), row in zip(self._buffers, rows, strict=True):
            ctypes.memmove(address + index * size, row, size)
