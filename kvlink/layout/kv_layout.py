# SPDX-License-Identifier: Apache-2.0
"""Defines the layout of one cache group: the place of every row in the regions of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlink.errors import ConfigError
from kvlink.layout.model_identity import model_id
from kvlink.layout.sharding import check_share, heads_of
from kvlink.layout.split import ALL_LAYERS, ALL_TOKENS, Context, Pipeline


@dataclass(frozen=True, slots=True)
class Plane:
    """The K or V of one layer. Its block 0 starts `offset` bytes into pool region `region`."""

    region: int
    layer: int
    offset: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Gives the place of every row: plane.offset + block, token and head (from `first_head`) × stride, in bytes.

    K and V are always two planes. If they are side by side, V starts `row_bytes` after K. Planes are ordered by layer,
    K first. Construction raises ConfigError, naming the field, for values that no memory can have.
    """

    model: str
    """Free text that must be the same at both ends. An empty text is not compared.

    A reader whose text is an identity compares it with each ticket instead, see kvlink.layout.model_identity.
    """
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
    is_state: bool = False
    """True for state of a fixed size, as Mamba's layers have. A block is one state, and takes the place of a token."""
    pipeline: Pipeline = ALL_LAYERS
    """The stage that has the layers of the planes, which are counted over the whole model."""
    context: Context = ALL_TOKENS
    """The tokens that the blocks hold."""
    num_layers: int = field(init=False, compare=False, repr=False)
    """One more than the highest layer."""

    def __post_init__(self) -> None:
        """Checks the fields against each other."""
        for name in ("block_tokens", "total_heads", "num_heads", "row_bytes", "num_blocks", "tp_size"):
            if not 1 <= getattr(self, name) < 2**32:
                raise ConfigError(f"layout: {name} must be in 1 to 2^32 - 1, not {getattr(self, name)}")
        if self.is_state and self.block_tokens != 1:
            raise ConfigError(
                f"layout: a block holds one state, so block_tokens is 1, not {self.block_tokens}"
            )
        held = heads_of(self.total_heads, self.tp_rank, self.tp_size)
        if (self.first_head, self.first_head + self.num_heads) != held:
            raise ConfigError(
                f"layout: first_head {self.first_head} and num_heads {self.num_heads} must mean heads "
                f"{held[0]} to {held[1]} of {self.total_heads}, for rank {self.tp_rank} of {self.tp_size}"
            )
        check_share(self)
        if self.is_state and self.context.size > 1:
            raise ConfigError("layout: a state is not one of tokens, so ranks cannot share its tokens")
        if not self.planes:
            raise ConfigError("layout: planes must not be empty")
        for index, plane in enumerate(self.planes):
            if not (0 <= plane.region < 2**16 and 0 <= plane.layer < 2**32 - 1 and 0 <= plane.offset < 2**63):
                raise ConfigError(f"layout: planes[{index}] is out of range: {plane}")
        for name in ("block_stride", "token_stride", "head_stride", "extent_bytes"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ConfigError(f"layout: {name} must be in 0 to 2^63 - 1, not {getattr(self, name)}")
        object.__setattr__(self, "num_layers", 1 + max(plane.layer for plane in self.planes))
        first, end = self.layers
        if self.num_layers > end or min(plane.layer for plane in self.planes) < first:
            raise ConfigError(
                f"layout: the planes must be of layers {first} to {end}, which stage {self.pipeline.rank} has"
            )

    @property
    def layers(self) -> tuple[int, int]:
        """The half-open range of the model's layers that this rank may have."""
        return self.pipeline.layers(self.num_layers)

    @property
    def total_layers(self) -> int:
        """The layers of the whole model."""
        return self.pipeline.bounds[-1] if self.pipeline.bounds else self.num_layers

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
        """Returns the number of blocks that hold this rank's part of `num_tokens` tokens. The last may be partial."""
        return -(-self.context.num_before(num_tokens) // self.block_tokens)

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """The bytes that each pool region must have, in region order."""
        needed = [0] * (1 + max(plane.region for plane in self.planes))
        extent = self.extent_bytes
        for plane in self.planes:
            needed[plane.region] = max(needed[plane.region], plane.offset + extent)
        return tuple(needed)

    def difference(self, other: KVLayout) -> str | None:
        """Describes the first field that shows that `other` is a cache of a different model. None if they fit.

        Block size, strides, number of blocks, and the ranks that share heads, layers and tokens may differ, because the
        planner converts them.
        """
        for name in ("model", "dtype", "row_bytes", "total_heads", "total_layers", "is_state"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and (name != "model" or (ours and theirs and not model_id(ours))):
                return f"{name} differs: {ours!r} here, {theirs!r} there"
        own, others = (each.planes_of(common_layers(self, other)) for each in (self, other))
        if len(own) != len(others):
            return f"the number of planes differs: {len(own)} here, {len(others)} there"
        for index, (ours, theirs) in enumerate(zip(own, others, strict=True)):
            if ours.layer != theirs.layer:
                return f"the layer of plane {index} differs: {ours.layer} here, {theirs.layer} there"
        return None

    def planes_of(self, layers: tuple[int, int]) -> tuple[Plane, ...]:
        """Returns the planes of a half-open range of layers."""
        first, end = layers
        if first <= 0 and self.num_layers <= end:
            return self.planes
        return tuple(plane for plane in self.planes if first <= plane.layer < end)


def common_layers(layout: KVLayout, other: KVLayout) -> tuple[int, int]:
    """Returns the half-open range of layers that two ranks of one model both may have. It may be empty."""
    (first, end), (other_first, other_end) = layout.layers, other.layers
    return max(first, other_first), min(end, other_end)
