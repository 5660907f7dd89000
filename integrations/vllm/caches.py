# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's KV caches as a kvlink pool: the place of every layer, and which layers share a block table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout, Plane, heads_of
from kvlink.transfer.pool import BlockPool

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of one rank. Layers are numbered group by group: group g has the layers of the range `groups[g]`."""

    pool: BlockPool
    groups: tuple[tuple[int, int], ...]
    kernel_blocks: int
    """The number of the pool's blocks that make one block of the scheduler."""
    token_unit: int
    """How many tokens of vLLM are one of the pool's layout: those of a block, if only whole blocks can be moved."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this worker in its server. `total_heads` is the number of KV heads of the whole model, 1 for MLA."""

    tp_rank: int
    tp_size: int
    total_heads: int


def caches_of(
    tensors: Mapping[str, torch.Tensor],
    layer_groups: Sequence[Sequence[str]],
    num_blocks: int,
    rank: Rank,
    model: str,
) -> Caches:
    """Describes the caches of the layers that are transferred.

    `tensors` has, by layer, tensors of [blocks, heads, tokens, K and V of one head], with strides in any order. The
    scheduler's `num_blocks` may be cut into smaller ones of the kernels. Layers without a group share another's cache.
    Raises ConfigError, naming the layer, for caches that no single layout describes.
    """
    names = [name for group in layer_groups for name in group]
    shapes = {name: _shape(name, tensors[name]) for name in names}
    first = shapes[names[0]]
    for name, shape in shapes.items():
        if shape != first:
            raise ConfigError(
                f"layer {name} has cache {shape}, {names[0]} {first}: one layout cannot describe both"
            )
    if first.blocks % num_blocks:
        raise ConfigError(f"{first.blocks} cache blocks are not a multiple of the scheduler's {num_blocks}")
    storages, planes = _planes([tensors[name] for name in names])
    total = rank.total_heads
    held = heads_of(total, rank.tp_rank, rank.tp_size)
    if held[1] - held[0] != first.heads:
        # The backend packs heads its own way, so only ranks of the same degree can read it.
        total = first.heads * rank.tp_size
        held = heads_of(total, rank.tp_rank, rank.tp_size)
    layout = KVLayout(
        model=model,
        dtype=first.dtype,
        block_tokens=first.tokens,
        total_heads=total,
        first_head=held[0],
        num_heads=first.heads,
        row_bytes=first.row_bytes,
        block_stride=first.block_stride,
        token_stride=first.token_stride,
        head_stride=first.head_stride,
        num_blocks=first.blocks,
        planes=planes,
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
    )
    ends = [sum(map(len, layer_groups[: index + 1])) for index in range(len(layer_groups))]
    groups = tuple(zip([0, *ends[:-1]], ends, strict=True))
    used = zip(storages, layout.region_bytes(), strict=True)
    pool = BlockPool.from_tensors([storage[:num_bytes] for storage, num_bytes in used], layout)
    return Caches(pool, groups, first.blocks // num_blocks, first.token_unit)


@dataclass(frozen=True, slots=True)
class _Shape:
    blocks: int
    heads: int
    tokens: int
    row_bytes: int
    block_stride: int
    head_stride: int
    token_stride: int
    dtype: str
    token_unit: int


def _shape(name: str, tensor: torch.Tensor) -> _Shape:
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise ConfigError(
            f"layer {name}: kvlink takes caches [blocks, heads, tokens, content] with adjoining content, this one "
            f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )
    blocks, heads, tokens, content = tensor.shape
    item = tensor.element_size()
    block_stride, head_stride, token_stride, _ = (stride * item for stride in tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.device.type != "cpu":
        return _Shape(
            blocks, heads, tokens, content * item, block_stride, head_stride, token_stride, dtype, 1
        )
    # The kernels for CPUs interleave the tokens of a head's page for their vectors.
    if tensor.stride(2) != content:
        raise ConfigError(
            f"layer {name}: on a CPU a head's tokens must adjoin (layout LBHNC), not {tensor.stride()}"
        )
    return _Shape(blocks, heads, 1, tokens * content * item, block_stride, head_stride, 0, dtype, tokens)


def _planes(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], tuple[Plane, ...]]:
    """Returns every allocation once, as bytes, and the place of each layer in them. Layers may overlap."""
    import torch

    regions: dict[int, int] = {}
    storages: list[torch.Tensor] = []
    planes = []
    for layer, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in regions:
            regions[address] = len(storages)
            storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        planes.append(Plane(regions[address], layer, tensor.data_ptr() - address))
    return storages, tuple(planes)
