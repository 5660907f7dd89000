# SPDX-License-Identifier: Apache-2.0
"""Derives layouts from the axes of a KV cache: from the order in which they are nested, or from their strides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral

from kvlink.errors import ConfigError
from kvlink.layout.kv_layout import KVLayout, Plane
from kvlink.layout.sharding import heads_of
from kvlink.layout.split import ALL_LAYERS, ALL_TOKENS, Context, Pipeline
from kvlink.runtime.names import check_kind


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
class Geometry:
    """The KV cache that one rank of a model holds, without its place in memory.

    Geometry(32, 8, 256, 4096) is a model with 32 layers and 8 KV heads of dimension 128 in bfloat16: 256 bytes a row.
    A block of 16 tokens then has 2 MiB: 32 layers × 2 planes × 16 tokens × 8 heads × 256 bytes.
    """

    num_layers: int
    """Layers of the whole model."""
    total_heads: int
    """KV heads of the whole model, 1 for MLA."""
    row_bytes: int
    """Bytes of the K (or V) of one head of one token: head dimension × size of the dtype."""
    num_blocks: int
    """Blocks that this rank's cache has. Ids of blocks begin with 0."""
    block_tokens: int = 16
    """Tokens of one block."""
    planes_per_layer: int = 2
    """2 for K and V, 1 for MLA, which has one latent per layer."""
    dtype: str = "bfloat16"
    model: str = ""
    tp_rank: int = 0
    tp_size: int = 1
    pipeline: Pipeline = ALL_LAYERS
    context: Context = ALL_TOKENS

    def __post_init__(self) -> None:
        """Checks the fields that KVLayout cannot check."""
        for name in ("num_layers", "total_heads", "row_bytes", "num_blocks", "block_tokens"):
            check_kind(getattr(self, name), Integral, name, "a whole number")
        if self.num_layers < 1 or self.planes_per_layer not in (1, 2):
            raise ConfigError(f"num_layers must be positive and planes_per_layer 1 or 2: {self}")
        if self.pipeline.bounds and self.pipeline.bounds[-1] != self.num_layers:
            raise ConfigError(
                f"the stages of the pipeline have {self.pipeline.bounds[-1]} layers, num_layers is {self.num_layers}"
            )

    @property
    def heads(self) -> tuple[int, int]:
        """The half-open range of the model's heads that this rank holds."""
        return heads_of(self.total_heads, self.tp_rank, self.tp_size)

    @property
    def layers(self) -> tuple[int, int]:
        """The half-open range of the model's layers that this rank holds."""
        return self.pipeline.layers(self.num_layers)

    def count(self, axis: Axis) -> int:
        """Returns the number of elements along an axis."""
        first, end = self.heads
        return {
            Axis.LAYER: self.layers[1] - self.layers[0],
            Axis.KV: self.planes_per_layer,
            Axis.BLOCK: self.num_blocks,
            Axis.TOKEN: self.block_tokens,
            Axis.HEAD: end - first,
        }[axis]


def dense(geometry: Geometry, order: Order = Order.NHD, regions: Regions = Regions.ONE) -> KVLayout:
    """Returns the layout of a cache without gaps. `KVLayout.region_bytes` says how much memory to allocate.

    Raises ConfigError if `order` interleaves axes that `regions` puts into different allocations.
    """
    check_kind(geometry, Geometry, "the first argument", "a Geometry")
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
    first_layer, _ = geometry.layers
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
                layer=first_layer + layer,
                offset=layer * step[Axis.LAYER] + kv * step[Axis.KV],
            )
            for layer in range(geometry.count(Axis.LAYER))
            for kv in range(per_layer)
        ),
        tp_rank=geometry.tp_rank,
        tp_size=geometry.tp_size,
        pipeline=geometry.pipeline,
        context=geometry.context,
    )
