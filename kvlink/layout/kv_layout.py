# SPDX-License-Identifier: Apache-2.0
"""Defines the layout of one cache group: the place of every row in the regions of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlink.errors import ConfigError
from kvlink.sharding import heads_of


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
    is_state: bool = False
    """True for state of a fixed size, as Mamba's layers have. A block is one state, and takes the place of a token."""
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
        for name in ("model", "dtype", "row_bytes", "total_heads", "num_layers", "is_state"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs and (name != "model" or (ours and theirs)):
                return f"{name} differs: {ours!r} here, {theirs!r} there"
        if len(self.planes) != len(other.planes):
            return f"the number of planes differs: {len(self.planes)} here, {len(other.planes)} there"
        for index, (ours, theirs) in enumerate(zip(self.planes, other.planes, strict=True)):
            if ours.layer != theirs.layer:
                return f"the layer of plane {index} differs: {ours.layer} here, {theirs.layer} there"
        return None
