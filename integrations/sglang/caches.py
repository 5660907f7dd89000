# SPDX-License-Identifier: Apache-2.0
"""Describes SGLang's buffers as kvlink pools: one Worker for each group of equally shaped buffers.

SGLang lists its buffers as addresses: K of every layer, then V of every layer, and separately the state buffers
(sliding window, Mamba, …). A handoff has items of fixed size: a page of the KV cache, a slot or a page of a state.
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
    """Buffers with items of the same size, as SGLang lists them."""

    addresses: tuple[int, ...]
    num_bytes: tuple[int, ...]
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A scheduler process. `total_heads` is the number of KV heads of the whole model, 1 for MLA."""

    name: str
    """A name that is unique in the deployment and the same after a restart."""
    model: str
    dtype: str
    page_tokens: int
    total_heads: int
    tp_rank: int
    tp_size: int
    gpu: int | None = None
    number: int = 0
    """The rank among the server's processes, data-parallel ranks included, from 0 on."""


class Cache(NamedTuple):
    """A group of buffers and the worker that exports it.

    `component` is the index of the state to which it belongs; None means KV pages.
    """

    component: int | None
    worker: Worker


def grouped(
    addresses: Sequence[int], num_bytes: Sequence[int], item_bytes: Sequence[int], what: str
) -> list[Buffers]:
    """Groups buffers by the size of their items, in the order of first appearance. Raises ConfigError."""
    if not len(addresses) == len(num_bytes) == len(item_bytes):
        raise ConfigError(
            f"{what}: SGLang lists {len(addresses)} addresses, {len(num_bytes)} lengths, {len(item_bytes)} item lengths"
        )
    groups: dict[int, list[tuple[int, int]]] = {}
    for address, length, item in zip(addresses, num_bytes, item_bytes, strict=True):
        if not address or not 0 < item <= length:
            raise ConfigError(
                f"{what}: a buffer of {length} bytes at {address:#x} does not consist of items of {item} bytes"
            )
        groups.setdefault(item, []).append((address, length))
    return [
        Buffers(tuple(address for address, _ in rows), tuple(length for _, length in rows), item)
        for item, rows in groups.items()
    ]


def page_layout(buffers: Buffers, rank: Rank) -> KVLayout:
    """Returns the layout of pages of tokens and heads. Raises ConfigError.

    Ranks of another tensor-parallel degree can read a part of each page.
    """
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
    """Returns the layout of items of a state.

    Their content is opaque, so they are read whole, by ranks of the same tensor-parallel degree only.
    """
    what = f"{kind} of tp_size {rank.tp_size}"
    alone = replace(rank, dtype=what, page_tokens=1, total_heads=1, tp_rank=0, tp_size=1)
    return page_layout(buffers, alone)


def open_caches(
    kv: Sequence[Buffers], states: Sequence[tuple[str, Sequence[Buffers]]], rank: Rank, config: WorkerConfig
) -> list[Cache]:
    """Exports the caches until each worker is closed. `states` has the kind and the buffers of each component.

    Peers find each other's caches by their index in this list. If ports are configured, the first cache of the first
    rank takes the configured one; each further cache, then each further rank, takes the next. Raises ConfigError.
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
    """Returns a pool over memory that SGLang's scheduler owns, and which outlives the pool."""
    regions = [
        Region(address, length, None, None, gpu)
        for address, length in zip(buffers.addresses, buffers.num_bytes, strict=True)
    ]
    return BlockPool(regions, layout)


class AuxRows:
    """SGLang's metadata buffers: one row of each belongs to a request, with its first token, log-probabilities, …

    They are small and in host memory, and travel inside a message.
    """

    def __init__(self, addresses: Sequence[int], row_bytes: Sequence[int]) -> None:
        self._buffers = list(zip(addresses, row_bytes, strict=True))

    def read(self, index: int) -> tuple[bytes, ...]:
        """Copies a request's rows."""
        return tuple(ctypes.string_at(address + index * size, size) for address, size in self._buffers)

    def write(self, index: int, rows: Sequence[bytes]) -> None:
        """Stores the rows from the other server. Raises ConfigError if its buffers differ."""
        theirs, ours = [len(row) for row in rows], [size for _, size in self._buffers]
        if theirs != ours:
            raise ConfigError(
                f"prefill sent metadata rows of {theirs} bytes, decode has {ours}; start both servers with "
                f"the same flags"
            )
        for (address, size), row in zip(self._buffers, rows, strict=True):
            ctypes.memmove(address + index * size, row, size)
