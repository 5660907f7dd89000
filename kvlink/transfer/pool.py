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
from kvlink.hardware.gpudirect import CudaDriver, Driver, Placement, placed
from kvlink.layout import KVLayout
from kvlink.transfer.axes import layout_of, usual_shapes
from kvlink.transfer.tensor_check import check_tensors
from kvlink.transfer.tensors import views_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of a pool. `keeper` keeps the memory alive. `gpu`: CUDA's number of the device it is on."""

    address: int
    num_bytes: int
    keeper: object
    memory: _core.HostMemory | None
    gpu: int | None = None


class BlockPool:
    """A paged KV cache in host memory or on one GPU: one or more regions, described by one layout.

    The pool must outlive its Worker; the Worker holds a reference. Blocks are read by peers while they are offered,
    and written by pulls; nothing else in kvlink touches them.
    """

    def __init__(self, regions: Sequence[Region], layout: KVLayout) -> None:
        self.layout = layout
        self.regions = tuple(regions)
        if len({region.gpu for region in regions}) > 1:
            raise ConfigError(
                "the regions of a pool are on several devices; make one pool, and Worker, per GPU"
            )
        sizes = layout.region_bytes()
        if len(self.regions) != len(sizes):
            raise ConfigError(
                f"{len(self.regions)} regions were given and the layout has {len(sizes)}; give as many, in order"
            )
        for index, (region, needed) in enumerate(zip(self.regions, sizes, strict=True)):
            if region.num_bytes < needed:
                raise ConfigError(
                    f"the layout reaches {needed} bytes into region {index}, which has {region.num_bytes}"
                )

    @classmethod
    def allocate(cls, layout: KVLayout, *, huge_pages: bool = True, gpu: int | None = None) -> BlockPool:
        """Allocates zeroed memory that readers on the same host may map: on the host (shm), or on the GPU that CUDA
        calls `gpu` (cuda), where NICs may map it too. `huge_pages` is advice for host memory.

        Raises ConfigError without memory, TransportUnavailable without a GPU.
        """
        sizes = layout.region_bytes()
        return cls(
            [_on_host(size, huge_pages) if gpu is None else _on_gpu(size, gpu) for size in sizes], layout
        )

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Any],
        layout: KVLayout | None = None,
        *,
        axes: str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        block_tokens: int | None = None,
        total_heads: int | None = None,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> BlockPool:
        """Registers memory that somebody else allocated: torch tensors, numpy arrays, or anything with DLPack; all on
        the CPU, or all on one CUDA device.

        axes: names the tensors' dimensions, for a pool whose layout is derived from their shapes, strides and dtype:
            "flash-attention", "flashinfer-nhd", "mla", …, or words such as "K/V blocks tokens heads row" for one
            tensor a layer of [2, N, block, H, D]; see kvlink.transfer.axes.
        model, dtype, total_heads, tp_rank, tp_size: fields of such a layout. By default the tensors' dtype, and ranks
            that share the heads evenly. block_tokens: for a dimension of slots, "blocks*tokens".
        layout: describes the memory instead: region i is `tensors[i]`, offsets count from its first element. Number of
            tensors, item size and every stride are compared with it. One-dimensional uint8 tensors are taken as
            regions of exactly the layout's size.

        On the CPU such a pool is reached by cma and tcp, not by shm; on a GPU by cuda and verbs, and by tcp, which
        stages it in host memory. None waits for CUDA streams: offer blocks once the kernels that wrote them have
        ended. Raises ConfigError, naming the tensor and the axis, for tensors that differ from the layout, overlap,
        are read-only, or are elsewhere.
        """
        views = views_of(tensors)
        options = {
            "model": model,
            "dtype": dtype,
            "block_tokens": block_tokens,
            "total_heads": total_heads,
            "tp_rank": tp_rank,
            "tp_size": tp_size,
        }
        said: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if layout is None:
            layout = layout_of(views, _named(axes), **said)
        elif axes is not None or said:
            names = ", ".join([*(["axes"] if axes is not None else []), *said])
            raise ConfigError(f"from_tensors takes a layout or {names}, not both: the layout says all of it")
        check_tensors(views, layout)
        return cls(
            [Region(view.address, view.num_bytes, view.keeper, None, view.gpu) for view in views], layout
        )

    def __repr__(self) -> str:
        """State in words."""
        gib = sum(region.num_bytes for region in self.regions) / 2**30
        kind = "kvlink's" if self.mappable else "lent" if self.gpu is None else f"cuda:{self.gpu}"
        return f"BlockPool({self.layout.num_blocks} blocks in {len(self.regions)} {kind} region(s), {gib:.3f} GiB)"

    @property
    def mappable(self) -> bool:
        """Whether readers on the same host can map every region."""
        return all(region.memory is not None for region in self.regions)

    def placements(self, driver: Driver | None = None) -> tuple[Placement, ...]:
        """Of each region on a GPU: device, PCI address, allocations with their ranges, kind and granularity. Empty on
        the host. Asks CUDA, through cuda-python unless another `driver` is given; raises TransportUnavailable without.
        """
        if self.gpu is None:
            return ()
        driver = driver or CudaDriver()
        return tuple(placed(driver, region.address, region.num_bytes) for region in self.regions)

    def numpy(self, region: int = 0) -> npt.NDArray[np.uint8]:
        """A writable view of one region's bytes, shape [bytes]. Copies nothing. Raises ConfigError on a GPU."""
        if self.gpu is not None:
            raise ConfigError(
                f"numpy cannot view cuda:{self.gpu}; use pool.torch(), or copy it to the CPU first"
            )
        return np.asarray(_Exported(self.regions[region]))

    @property
    def gpu(self) -> int | None:
        """CUDA's number of the device that holds the pool, None for host memory."""
        return self.regions[0].gpu if self.regions else None

    def torch(self, region: int = 0) -> torch.Tensor:
        """A view of one region as a uint8 tensor, shape [bytes]; use `.view(dtype)`. Copies nothing. Needs torch."""
        import torch

        keeper, num_bytes = self.regions[region].keeper, self.regions[region].num_bytes
        if not isinstance(keeper, torch.Tensor):
            if self.gpu is not None:
                return torch.as_tensor(_ExportedOnGpu(self.regions[region]), device=f"cuda:{self.gpu}")
            return torch.from_numpy(self.numpy(region))
        first = keeper.storage_offset() * keeper.element_size()
        flat = torch.empty(0, dtype=torch.uint8, device=keeper.device)
        return flat.set_(keeper.untyped_storage(), first, (num_bytes,), (1,))

    def __dlpack__(self, **options: Any) -> Any:
        """Region 0 as uint8, for `from_dlpack`."""
        return self._first().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where it is, as DLPack numbers devices."""
        kind, number = self._first().__dlpack_device__()
        return int(kind), int(number)

    def _first(self) -> Any:
        return self.numpy() if self.gpu is None else self.torch()


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


class _ExportedOnGpu:
    """The same for GPU memory, through CUDA's array interface."""

    def __init__(self, region: Region) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _on_host(num_bytes: int, huge_pages: bool) -> Region:
    memory = _core.HostMemory(num_bytes, huge_pages)
    return Region(memory.address, num_bytes, memory, memory)


def _on_gpu(num_bytes: int, gpu: int) -> Region:
    memory = _core.CudaMemory(num_bytes, gpu)
    return Region(memory.address, num_bytes, memory, None, gpu)


def _named(axes: str | None) -> str:
    if axes is None:
        raise ConfigError(
            "from_tensors needs the names of the dimensions: pass axes= as words in the order of the shape, or as a "
            f"usual one of {usual_shapes()}; or pass a layout"
        )
    return axes
