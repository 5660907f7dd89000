# SPDX-License-Identifier: Apache-2.0
"""Makes pools to offer and to pull into, their contents, and the result of a pull: by index, one row at a time."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
from transports.seen import seen

from kvlink import BlockPool
from kvlink.layout import Geometry, KVLayout, Order, Plane, Regions, dense
from kvlink.transfer.pool import Region

Bytes = npt.NDArray[np.uint8]
Contents = list[Bytes]
"""The bytes of each region."""


class Memory(Enum):
    """Says which library allocates a pool."""

    KVLINK = "kvlink"
    NUMPY = "numpy"
    TORCH = "torch"
    DLPACK = "dlpack"


ON_GPU = "gpu"
"""Memory of the GPU that tests/fake_cuda stands for; the process must find that in place of the driver."""
OWN_GPU = "own gpu"
"""The same, or a real one's, allocated by kvlink: other processes may map it."""

USUAL = os.environ.get("KVLINK_TEST_MEMORY", Memory.KVLINK.value)
"""Pools are in this memory unless a test says otherwise. test_gpu_direct.py runs the suite over transport `cuda`."""

_GPU_BIT = 1 << 60  # in addresses that no CPU can follow, as tests/fake_cuda/fake.h has it


class _StandInPool(BlockPool):
    """Gives tests the memory behind the stand-in's addresses, to fill and to check."""

    def numpy(self, region: int = 0) -> Bytes:
        memory = self.regions[region]
        seen = (ctypes.c_uint8 * memory.num_bytes).from_address(memory.address & ~_GPU_BIT)
        return np.ctypeslib.as_array(seen)


class _RealGpuPool(BlockPool):
    """On a real GPU; what the tests fill and check goes there and comes from there."""

    def numpy(self, region: int = 0) -> Bytes:
        return seen(self.torch(region))


class _OnlyDlpack:
    """Looks like another framework's tensor."""

    def __init__(self, array: Bytes) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def _tensor(memory: Memory, num_bytes: int) -> Any:
    if memory is Memory.TORCH:
        import torch

        return torch.zeros(num_bytes, dtype=torch.uint8)
    array = np.zeros(num_bytes, np.uint8)
    return _OnlyDlpack(array) if memory is Memory.DLPACK else array


def _on_gpu(array: Bytes) -> Region:
    return Region(array.ctypes.data | _GPU_BIT, array.size, array, None, gpu=0)


@dataclass(frozen=True)
class PoolSpec:
    """A pool, in a form that crosses processes."""

    num_blocks: int = 64
    block_tokens: int = 16
    num_layers: int = 2
    total_heads: int = 2
    row_bytes: int = 64
    planes_per_layer: int = 2
    tp_rank: int = 0
    tp_size: int = 1
    order: str = "NHD"
    regions: str = "ONE"
    memory: str = USUAL

    def layout(self) -> KVLayout:
        geometry = Geometry(
            num_layers=self.num_layers,
            total_heads=self.total_heads,
            row_bytes=self.row_bytes,
            num_blocks=self.num_blocks,
            block_tokens=self.block_tokens,
            planes_per_layer=self.planes_per_layer,
            tp_rank=self.tp_rank,
            tp_size=self.tp_size,
        )
        return dense(geometry, Order[self.order], Regions[self.regions])

    def make(self) -> BlockPool:
        layout = self.layout()
        if self.memory == OWN_GPU:
            regions = BlockPool.allocate(layout, gpu=0).regions
            stands_in = bool(regions[0].address & _GPU_BIT)
            return (_StandInPool if stands_in else _RealGpuPool)(regions, layout)
        if self.memory == ON_GPU:
            arrays = [np.zeros(size, np.uint8) for size in layout.region_bytes]
            return _StandInPool([_on_gpu(array) for array in arrays], layout)
        memory = Memory(self.memory)
        if memory is Memory.KVLINK:
            return BlockPool.allocate(layout, huge_pages=False)
        return BlockPool.from_tensors([_tensor(memory, size) for size in layout.region_bytes], layout)

    def json(self) -> dict[str, Any]:
        return asdict(self)


def wide(num_blocks: int, block_bytes: int = 16 << 10, **rest: Any) -> PoolSpec:
    """One plane of blocks that are one row each: a pull of n blocks moves n × `block_bytes`."""
    fields = {"block_tokens": 1, "num_layers": 1, "total_heads": 1, "planes_per_layer": 1}
    return PoolSpec(num_blocks=num_blocks, row_bytes=block_bytes, **(fields | rest))


def random_contents(layout: KVLayout, seed: int) -> Contents:
    """The same in every process."""
    return [
        np.random.default_rng([seed, region]).integers(0, 256, size, np.uint8)
        for region, size in enumerate(layout.region_bytes)
    ]


def fill(pool: BlockPool, seed: int) -> None:
    for region, content in enumerate(random_contents(pool.layout, seed)):
        pool.numpy(region)[: content.size] = content


def fill_share(pool: BlockPool, spec: PoolSpec, seed: int) -> None:
    """Gives a rank its heads of what a worker with all heads would have by `fill`."""
    whole = replace(spec, tp_rank=0, tp_size=1, order="NHD", regions="ONE").layout()
    source = Source(whole, random_contents(whole, seed), range(spec.num_blocks))
    tokens = range(spec.num_blocks * spec.block_tokens)
    layers = range(spec.num_layers)
    shares = expected(snapshot(pool), pool.layout, source.blocks, [source], tokens, layers)
    for region, content in enumerate(shares):
        pool.numpy(region)[: content.size] = content


def rows(
    layout: KVLayout, plane: Plane, blocks: Sequence[int], tokens: range, heads: range
) -> npt.NDArray[np.int64]:
    """Where the bytes of these rows lie in the plane's region, shape [tokens, heads, row_bytes]."""
    token = np.asarray(tokens)
    block = np.asarray(blocks, np.int64)[token // layout.block_tokens]
    starts = plane.offset + block * layout.block_stride + token % layout.block_tokens * layout.token_stride
    head = (np.asarray(heads) - layout.first_head) * layout.head_stride
    return starts[:, None, None] + head[None, :, None] + np.arange(layout.row_bytes)


@dataclass(frozen=True)
class Source:
    """Holds what one owner gives to a pull."""

    layout: KVLayout
    contents: Contents
    blocks: Sequence[int]


def expected(
    before: Contents,
    reader: KVLayout,
    reader_blocks: Sequence[int],
    sources: Sequence[Source],
    tokens: range,
    layers: range,
) -> Contents:
    """The reader's regions after a pull: `before` but for the rows pulled, each from any source that has its head."""
    after = [region.copy() for region in before]
    for source in sources:
        theirs = source.layout
        heads = range(
            max(theirs.first_head, reader.first_head),
            min(theirs.first_head + theirs.num_heads, reader.first_head + reader.num_heads),
        )
        for there, here in zip(theirs.planes, reader.planes, strict=True):
            if there.layer in layers:
                row = source.contents[there.region][rows(theirs, there, source.blocks, tokens, heads)]
                after[here.region][rows(reader, here, reader_blocks, tokens, heads)] = row
    return after


def poison(pool: BlockPool, seed: int) -> Contents:
    """Fills a destination with bytes that no owner has by chance, and returns a copy of them."""
    fill(pool, seed ^ 0x5EED_BAD)
    return snapshot(pool)


def snapshot(pool: BlockPool) -> Contents:
    return [pool.numpy(region)[:size].copy() for region, size in enumerate(pool.layout.region_bytes)]


def same(one: Contents, other: Contents) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))
