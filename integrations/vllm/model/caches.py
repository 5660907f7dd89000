# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's KV caches as a kvlink pool: the place of every layer, and which layers share a block table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout, Plane, heads_of
from kvlink.layout.groups import region_bytes
from kvlink.transfer.pool import BlockPool

from .states import States, parts_of

if TYPE_CHECKING:
    import torch

    Tensors = Mapping[str, torch.Tensor]
    """The caches by layer."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """The layers of one of vLLM's cache groups, which share a block table. `states` is None for attention."""

    names: tuple[str, ...]
    states: States | None = None


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of vLLM's cache groups in the pool, where it has one layout for each shape of its layers' caches."""

    num_layouts: int
    block_tokens: int
    """The tokens of vLLM in a block of these layouts, or 0 for states."""
    kernel_blocks: int
    """The number of these blocks that make one block of the scheduler."""
    token_unit: int
    """How many tokens of vLLM are one of the layouts: those of a block, if only whole blocks can be moved."""


@dataclass(frozen=True, slots=True)
class Caches:
    """The caches of one rank. The pool has the layouts of the first group, then those of the second, and so on."""

    pool: BlockPool
    groups: tuple[CacheGroup, ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this worker in its server. `total_heads` is the number of KV heads of the whole model, 1 for MLA."""

    tp_rank: int
    tp_size: int
    total_heads: int


def caches_of(
    tensors: Tensors,
    layer_groups: Sequence[LayerGroup],
    num_blocks: int,
    rank: Rank,
    model: str,
    page_format: str = "",
) -> Caches:
    """Describes the caches of the layers that are transferred. `page_format` says what dtype and shape do not.

    `tensors` has, by layer, tensors of [blocks, heads, tokens, K and V of one head], with strides in any order, or for
    states [blocks, 1, 1, bytes]. The scheduler's `num_blocks` may be cut into smaller ones of the kernels. Layers
    without a group share another's cache.
    Raises ConfigError, naming the layer, for caches that no layout describes.
    """
    storages = _Storages()
    layouts: list[KVLayout] = []
    groups = []
    for group in layer_groups:
        if group.states is None:
            shapes = _attention(group.names, tensors)
            added = [
                _attention_layout(shape, tensors, names, storages, rank, model) for shape, names in shapes
            ]
            first = shapes[0][0]
            if first.blocks % num_blocks:
                raise ConfigError(
                    f"{first.blocks} cache blocks are not a multiple of the scheduler's {num_blocks}"
                )
            kernel_blocks, unit = first.blocks // num_blocks, first.token_unit
            groups.append(CacheGroup(len(added), first.tokens * unit, kernel_blocks, unit))
        else:
            added = list(_state_layouts(group.names, group.states, tensors, storages, rank, model))
            groups.append(CacheGroup(len(added), 0, 1, 1))
        layouts += added
    used = zip(storages.tensors, region_bytes(layouts), strict=True)
    if page_format:
        layouts = [replace(layout, dtype=f"{layout.dtype} {page_format}") for layout in layouts]
    pool = BlockPool.from_tensors([storage[:num_bytes] for storage, num_bytes in used], layouts)
    return Caches(pool, tuple(groups))


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


class _Storages:
    """The allocations, each once, as bytes."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._regions: dict[int, int] = {}

    def plane(self, tensor: torch.Tensor, layer: int, offset: int = 0) -> Plane:
        """Returns the place of a tensor's element that is `offset` bytes behind its first. Layers may overlap."""
        import torch

        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._regions:
            self._regions[address] = len(self.tensors)
            self.tensors.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return Plane(self._regions[address], layer, tensor.data_ptr() - address + offset)


def _attention(names: Sequence[str], tensors: Tensors) -> list[tuple[_Shape, list[str]]]:
    """Returns the layers of a group by the shape of their caches. They share the blocks of the scheduler."""
    by_shape: dict[_Shape, list[str]] = {}
    for name in names:
        by_shape.setdefault(_shape(name, tensors[name]), []).append(name)
    shapes = list(by_shape.items())
    first = shapes[0][0]
    for shape, layers in shapes:
        if (shape.blocks, shape.tokens, shape.token_unit) != (first.blocks, first.tokens, first.token_unit):
            raise ConfigError(
                f"layer {layers[0]} has cache {shape}, {names[0]} {first}: they share a block table, so their blocks "
                "must have the same number and tokens"
            )
    return shapes


def _attention_layout(
    shape: _Shape, tensors: Tensors, names: Sequence[str], storages: _Storages, rank: Rank, model: str
) -> KVLayout:
    total = rank.total_heads
    held = heads_of(total, rank.tp_rank, rank.tp_size)
    if held[1] - held[0] != shape.heads:
        # The backend packs heads its own way, so only ranks of the same degree can read it.
        total = shape.heads * rank.tp_size
        held = heads_of(total, rank.tp_rank, rank.tp_size)
    return KVLayout(
        model=model,
        dtype=shape.dtype,
        block_tokens=shape.tokens,
        total_heads=total,
        first_head=held[0],
        num_heads=shape.heads,
        row_bytes=shape.row_bytes,
        block_stride=shape.block_stride,
        token_stride=shape.token_stride,
        head_stride=shape.head_stride,
        num_blocks=shape.blocks,
        planes=tuple(storages.plane(tensors[name], i) for i, name in enumerate(names)),
        tp_rank=rank.tp_rank,
        tp_size=rank.tp_size,
    )


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


def _state_layouts(
    names: Sequence[str], states: States, tensors: Tensors, storages: _Storages, rank: Rank, model: str
) -> Iterable[KVLayout]:
    """Yields the layout of each part of the layers' states. Block n has the states of one request."""
    layers = [_pages(name, tensors[name], states) for name in names]
    strides = {(tensor.shape[0], tensor.stride(0)) for tensor in layers}
    if len(strides) > 1:
        raise ConfigError(
            f"layer {names[0]}: the layers of its group have blocks of several sizes: {strides}"
        )
    [(num_blocks, block_stride)] = strides
    for part in parts_of(states):
        total = part.num_heads * (1 if states.replicated else rank.tp_size)
        first, end = heads_of(total, rank.tp_rank, rank.tp_size)
        yield KVLayout(
            model=model,
            dtype=part.dtype,
            block_tokens=1,
            total_heads=total,
            first_head=first,
            num_heads=end - first,
            row_bytes=part.head_bytes,
            block_stride=block_stride,
            token_stride=0,
            head_stride=part.head_bytes,
            num_blocks=num_blocks,
            planes=tuple(
                storages.plane(tensor, layer, offset)
                for layer, tensor in enumerate(layers)
                for offset in part.offsets
            ),
            tp_rank=rank.tp_rank,
            tp_size=rank.tp_size,
            is_state=True,
        )


def _pages(name: str, tensor: torch.Tensor, states: States) -> torch.Tensor:
    """Returns the pages of a layer with states. Raises ConfigError unless they hold the states of the group."""
    shape, num_bytes = tuple(tensor.shape), states.num_bytes()
    if tensor.element_size() != 1 or shape[1:3] != (1, 1) or len(shape) != 4 or shape[3] < num_bytes:
        raise ConfigError(
            f"layer {name}: kvlink takes states as pages of bytes [blocks, 1, 1, {num_bytes} or more], this cache has "
            f"shape {shape} of {tensor.dtype}"
        )
    if tensor.stride(3) != 1:
        raise ConfigError(f"layer {name}: a page's bytes must adjoin, and its strides are {tensor.stride()}")
    return tensor


def page_format(cache_dtype: str, fp8: str, kernels: Iterable[str]) -> list[str]:
    """Returns words for a comparison: none if dtype and shape say all.

    `cache_dtype` is vLLM's setting. `fp8` is the type behind its "fp8" on this device, empty if the cache is not
    quantized. `kernels` are the kinds of instructions that the kernels for CPUs use.
    """
    words = []
    if fp8:
        words.append("cache=" + (fp8 if cache_dtype in ("fp8", "fp8_e4m3") else cache_dtype))
    if kinds := "+".join(sorted(set(kernels))):
        words.append("pages=" + kinds)
    return words
