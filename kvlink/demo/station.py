# SPDX-License-Identifier: Apache-2.0
"""What prefill and decode have in common: a worker, its pool seen as planes, and a block allocator."""

from __future__ import annotations

import torch

from kvlink import BlockPool, Worker
from kvlink.demo.model import SHAPE
from kvlink.demo.paging import BLOCK_TOKENS, NUM_BLOCKS, BlockAllocator, PagedPlanes
from kvlink.layout import Geometry, Order, Regions, dense

_DTYPE: torch.dtype = getattr(torch, SHAPE.dtype)
_LAYER = (2, NUM_BLOCKS, BLOCK_TOKENS, SHAPE.num_heads, SHAPE.head_dim)
_LAYOUT = dense(
    Geometry(
        num_layers=SHAPE.num_layers,
        total_heads=SHAPE.num_heads,
        row_bytes=SHAPE.head_dim * _DTYPE.itemsize,
        num_blocks=NUM_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        dtype=SHAPE.dtype,
        model="kvlink-demo",
    ),
    Order.NHD,
    Regions.PER_LAYER,
)


class Station:
    """One worker over one transport. Owns the pool; `close` is idempotent."""

    def __init__(self, role: str, transport: str, coordinator: str) -> None:
        pool, layers = _make_pool(transport)
        self.planes = PagedPlanes([layer[kv] for layer in layers for kv in range(2)])
        self.blocks = BlockAllocator(NUM_BLOCKS, seed=role)
        self.worker = Worker(
            pool, worker_id=f"{role}-{transport}", coordinator=coordinator, transports=transport
        )

    def close(self) -> None:
        """Leaves the coordinator and gives the pool up."""
        self.worker.close()


def _make_pool(transport: str) -> tuple[BlockPool, list[torch.Tensor]]:
    """A pool and its layers as tensors. Memory that shm can map is kvlink's; anything else is torch's own."""
    if transport.removeprefix("fault+") == "shm":
        pool = BlockPool.allocate(_LAYOUT)
        sizes = enumerate(_LAYOUT.region_bytes())
        return pool, [pool.torch(i)[:num_bytes].view(_DTYPE).view(_LAYER) for i, num_bytes in sizes]
    layers = [torch.zeros(_LAYER, dtype=_DTYPE) for _ in range(SHAPE.num_layers)]
    return BlockPool.from_tensors(layers, _LAYOUT), layers
