# SPDX-License-Identifier: Apache-2.0
"""Describes vLLM's KV caches as a kvlink pool: the place of every layer, and which layers share a block table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    row_tokens: Mapping[str, int] = field(default_factory=dict)
    """By layer, how many tokens a row of a compressed cache stands for. Layers that it does not name have 1."""
    replicated: frozenset[str] = frozenset()
    """Layers of which every rank has all heads, whatever the model has."""
    paged: frozenset[str] = frozenset()
    """Layers in whose pages the bytes of a token are not together, so that only whole pages can be moved."""


@dataclass(frozen=True, slots=True)
class TokenUnit:
    """The tokens of vLLM that one token of a layout stands for: a row, or a block if only whole blocks can be moved."""

    tokens: int = 1
    is_block: bool = False

    def range(self, first: int, end: int) -> tuple[int, int]:
        """Returns the units to move for tokens first to end.

        vLLM writes a row with the last of its tokens, and the tokens before it are in caches of their own. So a row
        that is begun is not moved: its bytes may be those of an earlier request. A block that is begun is moved.
        """
        stop = -(-end // self.tokens) if self.is_block else end // self.tokens
        return (first // self.tokens, stop) if first // self.tokens < stop else (0, 0)

    def divides(self, theirs: int, ours: int) -> bool:
        """Returns whether blocks of these numbers of tokens consist of such units."""
        return theirs == ours if self.is_block else theirs % self.tokens == 0


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One of vLLM's cache groups in the pool, where it has one layout for each shape of its layers' caches."""

    block_tokens: int
    """The tokens of vLLM in a block of these layouts, or 0 for states."""
    kernel_blocks: int
    """The number of these blocks that make one block of the scheduler."""
    units: tuple[TokenUnit, ...] = (TokenUnit(),)
    """By layout."""


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
    _check_carried(tensors, layer_groups)
    storages = _Storages()
    layouts: list[KVLayout] = []
    groups = []
    for group in layer_groups:
        if group.states is None:
            shapes = _attention(group, tensors)
            added = [
                _attention_layout(shape, tensors, names, storages, rank, model) for shape, names in shapes
            ]
            first = shapes[0][0]
            if first.blocks % num_blocks:
                raise ConfigError(
                    f"{first.blocks} cache blocks are not a multiple of the scheduler's {num_blocks}"
                )
            units = tuple(shape.unit for shape, _ in shapes)
            groups.append(CacheGroup(first.block_tokens, first.blocks // num_blocks, units))
        else:
            added = list(_state_layouts(group.names, group.states, tensors, storages, rank, model))
            groups.append(CacheGroup(0, 1, (TokenUnit(),) * len(added)))
        layouts += added
    used = zip(storages.tensors, region_bytes(layouts), strict=True)
    if page_format:
        layouts = [replace(layout, dtype=f"{layout.dtype} {page_format}") for layout in layouts]
    pool = BlockPool.from_tensors([storage[:num_bytes] for storage, num_bytes in used], layouts)
    return Caches(pool, tuple(groups))


def _check_carried(tensors: Tensors, layer_groups: Sequence[LayerGroup]) -> None:
    """Raises ConfigError for a cache that is in no group, and is not one of a layer of theirs by another name."""
    carried = [name for group in layer_groups for name in group.names]
    places = {tensors[name].data_ptr() for name in carried}
    for name, tensor in tensors.items():
        if name not in carried and tensor.data_ptr() not in places:
            raise ConfigError(
                f"layer {name} has a cache of its own that is in no cache group which is transferred; decode would go "
                "on without it"
            )


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
    unit: TokenUnit
    is_replicated: bool

    @property
    def block_tokens(self) -> int:
        """The tokens of vLLM in a block."""
        return self.tokens * self.unit.tokens


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


def _attention(group: LayerGroup, tensors: Tensors) -> list[tuple[_Shape, list[str]]]:
    """Returns the layers of a group by the shape of their caches. They share the blocks of the scheduler."""
    by_shape: dict[_Shape, list[str]] = {}
    for name in group.names:
        shape = _shape(name, tensors[name], group)
        by_shape.setdefault(shape, []).append(name)
    shapes = list(by_shape.items())
    first = shapes[0][0]
    for shape, layers in shapes:
        if (shape.blocks, shape.block_tokens) != (first.blocks, first.block_tokens):
            raise ConfigError(
                f"layer {layers[0]} has cache {shape}, {group.names[0]} {first}: they share a block table, so their "
                "blocks must have the same number and tokens"
            )
    return shapes


def _attention_layout(
    shape: _Shape, tensors: Tensors, names: Sequence[str], storages: _Storages, rank: Rank, model: str
) -> KVLayout:
    total = 1 if shape.is_replicated and shape.heads == 1 else rank.total_heads
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


def _shape(name: str, tensor: torch.Tensor, group: LayerGroup) -> _Shape:
    if tensor.dim() != 4 or tensor.stride(3) != 1:
        raise ConfigError(
            f"layer {name}: kvlink takes caches [blocks, heads, tokens, content] with adjoining content, this one "
            f"has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        )
    blocks, heads, rows, content = tensor.shape
    item, row_tokens = tensor.element_size(), group.row_tokens.get(name, 1)
    block_stride, head_stride, row_stride, _ = (stride * item for stride in tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    if row_tokens > 1:
        dtype += f" {row_tokens} tokens a row"
    row_bytes, unit = content * item, TokenUnit(row_tokens)
    if name in group.paged:
        if heads > 1 and rows > 1:
            dtype += f" {heads} heads {'in' if head_stride < row_stride else 'around'} each token"
        unit = TokenUnit(rows * row_tokens, is_block=True)
        heads, rows, row_stride = 1, 1, 0
        row_bytes = head_stride = _page_elements(name, tensor) * item
    elif _interleaves(tensor):
        if tensor.stride(2) != content:
            raise ConfigError(
                f"layer {name}: on a CPU a head's tokens must adjoin (layout LBHNC), not {tensor.stride()}"
            )
        unit = TokenUnit(rows * row_tokens, is_block=True)
        rows, row_bytes, row_stride = 1, rows * row_bytes, 0
    return _Shape(
        blocks,
        heads,
        rows,
        row_bytes,
        block_stride,
        head_stride,
        row_stride,
        dtype,
        unit,
        name in group.replicated,
    )


def _page_elements(name: str, tensor: torch.Tensor) -> int:
    """Returns the number of elements in a page, whatever the order of its dimensions. Raises ConfigError for gaps."""
    elements = 1
    for stride, count in sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True)):
        if count > 1 and stride != elements:
            raise ConfigError(
                f"layer {name}: a page's bytes must adjoin, and its strides are {tensor.stride()}"
            )
        elements *= count
    return elements


def _interleaves(tensor: torch.Tensor) -> bool:
    """Returns whether kernels interleave the tokens of a head's page, as those for CPUs do for their vectors."""
    return tensor.device.type == "cpu"


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
    """Returns the pages of a layer as bytes. Raises ConfigError unless they hold the states of the group."""
    import torch

    shape, num_bytes = tuple(tensor.shape), states.num_bytes()
    page = _page_elements(name, tensor) * tensor.element_size()
    if len(shape) != 4 or page < num_bytes:
        raise ConfigError(
            f"layer {name}: kvlink takes states as pages of bytes [blocks, 1, 1, {num_bytes} or more], this cache has "
            f"shape {shape} of {tensor.dtype}"
        )
    stride = tensor.stride(0) * tensor.element_size()
    return tensor.view(torch.uint8).as_strided((shape[0], 1, 1, page), (stride, page, page, 1))


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
