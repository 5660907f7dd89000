# SPDX-License-Identifier: Apache-2.0
"""Describes where a worker's KV blocks are in memory.

A layout has five axes: layer, K or V, block, token, head. A row is the K (or V) of one head of one token, in contiguous
bytes. `dense` nests the axes in an order that an engine uses, and `from_strides` describes existing memory.
kvlink.sharding decides which heads a reader takes from which rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvlink.errors import ConfigError
from kvlink.sharding import Assignment, assign, heads_of, num_seats

__all__ = [
    "Assignment",
    "Axis",
    "Geometry",
    "KVLayout",
    "Order",
    "Plane",
    "Regions",
    "assign",
    "dense",
    "from_strides",
    "heads_of",
    "num_seats",
]


class Axis(Enum):
    """The axes of a KV cache. A stride steps over one of them."""

    LAYER = "L"
    KV = "K"
    BLOCK = "B"
    TOKEN = "T"
    HEAD = "H"


class Order(Enum):
    """The nesting of the axes, outermost first.

    The shapes below are those of one layer with N blocks of `block` tokens and H heads of dimension D.
    """

    NHD = "LKBTH"
    """[2, N, block, H, D]: FlashAttention; [N, block, D] for MLA."""
    HND = "LKBHT"
    """[2, N, H, block, D]."""
    PAIRED_NHD = "LBKTH"
    """[N, 2, block, H, D]: FlashInfer."""
    PAIRED_HND = "LBKHT"
    """[N, 2, H, block, D]: FlashInfer."""
    BESIDE_NHD = "LBTHK"
    """[N, block, H, 2 D]: V directly follows K in every row."""
    BESIDE_HND = "LBHTK"
    """[N, H, block, 2 D]: vLLM on CPUs."""
    CROSS_LAYER_NHD = "BLKTH"
    """[N, layers, 2, block, H, D]: all layers of a block are adjacent."""
    CROSS_LAYER_HND = "BLKHT"
    """[N, layers, 2, H, block, D]: all layers of a block are adjacent."""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes, outermost first."""
        return tuple(map(Axis, self.value))


class Regions(Enum):
    """Says which planes share an allocation. Region i is the i-th tensor given to `BlockPool.from_tensors`."""

    ONE = ""
    """Region 0 holds all planes."""
    PER_LAYER = "L"
    """Region i holds layer i."""
    PER_PLANE = "LK"
    """The regions hold K of layer 0, V of layer 0, K of layer 1, …"""

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that the regions step over, outermost first."""
        return tuple(map(Axis, self.value))


@dataclass(frozen=True, slots=True)
class Plane:
    """The K or V of one layer. Its block 0 starts `offset` bytes into pool region `region`."""

    region: int
    layer: int
    offset: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache that one tensor-parallel rank of a model holds, without its place in memory."""

    num_layers: int
    total_heads: int
    """KV heads of the whole model, 1 for MLA."""
    row_bytes: int
    """Bytes of the K (or V) of one head of one token: head dimension × size of the dtype."""
    num_blocks: int
    block_tokens: int = 16
    planes_per_layer: int = 2
    """2 for K and V, 1 for MLA, which has one latent per layer."""
    dtype: str = "bfloat16"
    model: str = ""
    tp_rank: int = 0
    tp_size: int = 1

    def __post_init__(self) -> None:
        """Checks the fields that KVLayout cannot check."""
        if self.num_layers < 1 or self.planes_per_layer not in (1, 2):
            raise ConfigError(f"num_layers must be positive and planes_per_layer 1 or 2: {self}")

    @property
    def heads(self) -> tuple[int, int]:
        """The half-open range of the model's heads that this rank holds."""
        return heads_of(self.total_heads, self.tp_rank, self.tp_size)

    def count(self, axis: Axis) -> int:
        """Returns the number of elements along an axis."""
        first, end = self.heads
        return {
            Axis.LAYER: self.num_layers,
            Axis.KV: self.planes_per_layer,
            Axis.BLOCK: self.num_blocks,
            Axis.TOKEN: self.block_tokens,
            Axis.HEAD: end - first,
        }[axis]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Gives the place of every row: plane.offset + block, token and head (from `first_head`) × stride, in bytes.

    K and V are always two planes. If they are side by side, V starts `row_bytes` after K. Planes are ordered by layer,
    K first. Construction raises ConfigError, naming the field, for values that no memory can have.
    """

    model: str
    """Free text that must be the same at both ends. An empty text is not compared."""
    dtype: str
    block_tokens: int
    total_heads: int
    """KV heads of the whole model, 1 for MLA."""
    first_head: int
    num_heads: int
    row_bytes: int
    block_stride: int
    token_stride: int
    head_stride: int
    num_blocks: int
    planes: tuple[Plane, ...]
    tp_rank: int = 0
    tp_size: int = 1
    num_layers: int = field(init=False, compare=False, repr=False)
    """One more than the highest layer."""

    def __post_init__(self) -> None:
        """Checks the fields against each other."""
        for name in ("block_tokens", "total_heads", "num_heads", "row_bytes", "num_blocks", "tp_size"):
            if not 1 <= getattr(self, name) < 2**32:
                raise ConfigError(f"layout: {name} must be in 1 to 2^32 - 1, not {getattr(self, name)}")
        held = heads_of(self.total_heads, self.tp_rank, self.tp_size)
        if (self.first_head, self.first_head + self.num_heads) != held:
            raise ConfigError(
                f"layout: first_head {self.first_head} and num_heads {self.num_heads} must mean heads "
                f"{held[0]} to {held[1]} of {self.total_heads}, for rank {self.tp_rank} of {self.tp_size}"
            )
        if not self.planes:
            raise ConfigError("layout: planes must not be empty")
        for index, plane in enumerate(self.planes):
            if not (0 <= plane.region < 2**16 and 0 <= plane.layer < 2**32 - 1 and 0 <= plane.offset < 2**63):
                raise ConfigError(f"layout: planes[{index}] is out of range: {plane}")
        for name in ("block_stride", "token_stride", "head_stride", "extent_bytes"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ConfigError(f"layout: {name} must be in 0 to 2^63 - 1, not {getattr(self, name)}")
        object.__setattr__(self, "num_layers", 1 + max(plane.layer for plane in self.planes))

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one token over all planes."""
        return self.num_heads * self.row_bytes * len(self.planes)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block over all planes."""
        return self.block_tokens * self.token_bytes

    @property
    def extent_bytes(self) -> int:
        """Bytes from the start of a plane to the end of its last row. Raises ConfigError if rows overlap."""
        steps = sorted(
            (stride, count, name)
            for name, stride, count in (
                ("block_stride", self.block_stride, self.num_blocks),
                ("token_stride", self.token_stride, self.block_tokens),
                ("head_stride", self.head_stride, self.num_heads),
            )
            if count > 1
        )
        extent = self.row_bytes
        for stride, count, name in steps:
            if stride < extent:
                raise ConfigError(f"layout: {name} is {stride} but what it steps over has {extent} bytes")
            extent += stride * (count - 1)
        return extent

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold `num_tokens` tokens. The last block may be partial."""
        return -(-num_tokens // self.block_tokens)

    def region_bytes(self) -> tuple[int, ...]:
        """Returns the bytes that each pool region must have, in region order."""
        needed = [0] * (1 + max(plane.region for plane in self.planes))
        extent = self.extent_bytes
        for plane in self.planes:
            needed[plane.region] = max(needed[plane.region], plane.offset + extent)
        return tuple(needed)

    def difference(self, other: KVLayout) -> str | None:
        """Describes the first field that shows that `other` is a cache of a different model. None if they fit.

        Block size, strides, number of blocks and tensor-parallel degree may differ, because the planner converts them.
        """
        for name in ("model", "dtype", "row_bytes", "total_heads", "num_layers"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and (name != "model" or (ours and theirs)):
                return f"{name} differs: {ours!r} here, {theirs!r} there"
        if len(self.planes) != len(other.planes):
            return f"the number of planes differs: {len(self.planes)} here, {len(other.planes)} there"
        for index, (ours, theirs) in enumerate(zip(self.planes, other.planes, strict=True)):
            if ours.layer != theirs.layer:
                return f"the layer of plane {index} differs: {ours.layer} here, {theirs.layer} there"
        return None


def dense(geometry: Geometry, order: Order = Order.NHD, regions: Regions = Regions.ONE) -> KVLayout:
    """Returns the layout of a cache without gaps. `KVLayout.region_bytes` says how much memory to allocate.

    Raises ConfigError if `order` interleaves axes that `regions` puts into different allocations.
    """
    apart = regions.axes
    if set(order.axes[: len(apart)]) != set(apart):
        raise ConfigError(
            f"{order} interleaves axes that {regions} separates; use Regions.ONE or another order"
        )
    strides = {}
    step = geometry.row_bytes
    for axis in reversed(order.axes[len(apart) :]):
        strides[axis] = step
        step *= geometry.count(axis)
    return from_strides(geometry, strides, regions)


def from_strides(geometry: Geometry, strides: Mapping[Axis, int], regions: Regions) -> KVLayout:
    """Returns the layout of existing memory. Raises ConfigError if a stride is missing or not possible.

    `strides` gives, in bytes (a tensor's stride × its item size), every axis within a region that has more than one
    element. A tensor whose last dimension holds K and V side by side ([…, 2 D]) has {Axis.KV: row_bytes}.
    """
    within = [axis for axis in Axis if axis not in regions.axes]
    if missing := [axis.name for axis in within if axis not in strides and geometry.count(axis) > 1]:
        raise ConfigError(f"strides: {', '.join(missing)} is missing")
    step = {axis: strides.get(axis, 0) if axis in within else 0 for axis in Axis}
    first, end = geometry.heads
    per_layer = geometry.planes_per_layer
    region_steps = {Regions.ONE: (0, 0), Regions.PER_LAYER: (1, 0), Regions.PER_PLANE: (per_layer, 1)}
    layer_regions, kv_regions = region_steps[regions]
    return KVLayout(
        model=geometry.model,
        dtype=geometry.dtype,
        block_tokens=geometry.block_tokens,
        total_heads=geometry.total_heads,
        first_head=first,
        num_heads=end - first,
        row_bytes=geometry.row_bytes,
        block_stride=step[Axis.BLOCK],
        token_stride=step[Axis.TOKEN],
        head_stride=step[Axis.HEAD],
        num_blocks=geometry.num_blocks,
        planes=tuple(
            Plane(
                region=layer * layer_regions + kv * kv_regions,
                layer=layer,
                offset=layer * step[Axis.LAYER] + kv * step[Axis.KV],
            )
            for layer in range(geometry.num_layers)
            for kv in range(per_layer)
        ),
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
    )
