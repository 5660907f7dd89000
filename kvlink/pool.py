# SPDX-License-Identifier: Apache-2.0
"""The memory that holds a worker's KV blocks: allocated by kvlink, or lent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlink import _core
from kvlink.errors import ConfigError
from kvlink.layout import KVLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of a pool. `keeper` keeps the memory alive."""

    address: int
    num_bytes: int
    keeper: object
    memory: _core.HostMemory | None


class BlockPool:
    """A paged KV cache in host memory: one or more regions, described by one layout.

    The pool must outlive its Worker; the Worker holds a reference. Blocks are read by peers while they are offered,
    and written by pulls; nothing else in kvlink touches them.
    """

    def __init__(self, regions: Sequence[Region], layout: KVLayout) -> None:
        self.layout = layout
        self.regions = tuple(regions)
        for index, needed in enumerate(layout.region_bytes()):
            have = self.regions[index].num_bytes if index < len(self.regions) else 0
            if have < needed:
                raise ConfigError(
                    f"the layout reaches {needed} bytes into region {index}, which has {have}; "
                    "give one tensor per region of the layout, in order"
                )

    @classmethod
    def allocate(cls, layout: KVLayout, *, huge_pages: bool = True) -> BlockPool:
        """Allocates zeroed memory that readers on the same host may map (shm). Raises ConfigError without memory."""
        regions = []
        for num_bytes in layout.region_bytes():
            memory = _core.HostMemory(num_bytes, huge_pages)
            regions.append(Region(memory.address, num_bytes, memory, memory))
        return cls(regions, layout)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Any], layout: KVLayout) -> BlockPool:
        """Lends memory that somebody else allocated: CPU torch tensors, numpy arrays, or anything with DLPack.

        Region i of the layout is `tensors[i]`; offsets count from its first element. Such a pool is reached by cma and
        tcp, not by shm. Raises ConfigError for tensors that are read-only, not on the CPU, or too small.
        """
        return cls([_region_of(tensor) for tensor in tensors], layout)

    def __repr__(self) -> str:
        """State in words."""
        gib = sum(region.num_bytes for region in self.regions) / 2**30
        kind = "kvlink's" if self.mappable else "lent"
        return f"BlockPool({self.layout.num_blocks} blocks in {len(self.regions)} {kind} region(s), {gib:.3f} GiB)"

    @property
    def mappable(self) -> bool:
        """Whether readers on the same host can map every region."""
        return all(region.memory is not None for region in self.regions)

    def numpy(self, region: int = 0) -> npt.NDArray[np.uint8]:
        """A writable view of one region's bytes, shape [bytes]. Copies nothing."""
        return np.asarray(_Exported(self.regions[region]))

    def torch(self, region: int = 0) -> torch.Tensor:
        """A view of one region as a uint8 tensor, shape [bytes]; use `.view(dtype)`. Copies nothing. Needs torch."""
        import torch

        return torch.from_numpy(self.numpy(region))

    def __dlpack__(self, **options: Any) -> Any:
        """Region 0 as uint8, for `from_dlpack`."""
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Host memory."""
        return (1, 0)


class _Exported:
    """Lends a region through the array interface; the view keeps it, and with it the memory, alive."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.__array_interface__ = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _region_of(tensor: Any) -> Region:
    if hasattr(tensor, "untyped_storage"):
        return _region_of_torch(tensor)
    array = tensor if isinstance(tensor, np.ndarray) else np.from_dlpack(tensor)
    if not array.flags.writeable:
        raise ConfigError("a pool needs writable memory; this array is read-only")
    extent = sum((size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True))
    if array.size == 0 or any(stride < 0 for stride in array.strides):
        raise ConfigError("a pool needs non-empty arrays without negative strides")
    return Region(array.ctypes.data, extent + array.itemsize, array, None)


def _region_of_torch(tensor: torch.Tensor) -> Region:
    if tensor.device.type != "cpu":
        raise ConfigError(f"host pools take CPU tensors, this one is on {tensor.device}")
    if tensor.numel() == 0:
        raise ConfigError("a pool needs non-empty tensors")
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return Region(tensor.data_ptr(), extent * tensor.element_size(), tensor, None)
