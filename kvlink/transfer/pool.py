# SPDX-License-Identifier: Apache-2.0
"""Defines the memory that holds a worker's KV blocks, which kvlink allocates or an engine registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvlink import _core
from kvlink.errors import ConfigError
from kvlink.hardware.gpudirect import CudaDriver, Driver, Placement, placed
from kvlink.layout import Context, KVLayout, Pipeline
from kvlink.layout.groups import checked_groups, region_bytes
from kvlink.layout.model_identity import PoolModel
from kvlink.transfer.axes import layout_of, named_shapes
from kvlink.transfer.tensor_check import check_tensors
from kvlink.transfer.tensors import views_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of a pool. `keeper` keeps the memory alive. `gpu` is CUDA's number of its device."""

    address: int
    num_bytes: int
    keeper: object
    memory: _core.HostMemory | None
    gpu: int | None = None


class BlockPool:
    """A paged KV cache in host memory or on one GPU: one or more regions, described by one layout or several.

    Several layouts are those of cache groups: layers whose caches differ in shape, as in hybrid models. They describe
    the same regions and may overlap there, because each group has blocks of its own: `offer` and `pull` then take one
    list of block ids for each group.
    The pool must outlive its Worker, which holds a reference. Peers read blocks while they are offered, and pulls write
    blocks. Nothing else in kvlink accesses them.
    """

    def __init__(self, regions: Sequence[Region], layout: KVLayout | Sequence[KVLayout]) -> None:
        self.groups = checked_groups(layout)
        """The layout of each cache group."""
        self.layout = self.groups[0]
        """The layout, or that of the first cache group."""
        self.model = PoolModel(self.layout.model)
        self.regions = tuple(regions)
        if len({region.gpu for region in regions}) > 1:
            raise ConfigError(
                "the regions of a pool are on several devices; make one pool, and Worker, per GPU"
            )
        sizes = region_bytes(self.groups)
        if len(self.regions) != len(sizes):
            raise ConfigError(
                f"{len(self.regions)} regions were given and the layout has {len(sizes)}; pass that many, in order"
            )
        for index, (region, needed) in enumerate(zip(self.regions, sizes, strict=True)):
            if region.num_bytes < needed:
                raise ConfigError(
                    f"the layout needs {needed} bytes in region {index}, which has {region.num_bytes}; enlarge it"
                )

    @classmethod
    def allocate(
        cls, layout: KVLayout | Sequence[KVLayout], *, huge_pages: bool = True, gpu: int | None = None
    ) -> BlockPool:
        """Allocates zeroed memory that readers on the same host can map, in host memory (shm) or on a GPU (cuda).

        gpu: CUDA's number of the GPU, whose memory NICs can map too. None allocates host memory.
        huge_pages: a hint for host memory.
        Raises ConfigError if there is not enough memory, and TransportUnavailable without a GPU.
        """
        sizes = region_bytes(checked_groups(layout))
        return cls(
            [_on_host(size, huge_pages) if gpu is None else _on_gpu(size, gpu) for size in sizes], layout
        )

    @classmethod
    def from_tensors(
        cls,
        tensors: Sequence[Any],
        layout: KVLayout | Sequence[KVLayout] | None = None,
        *,
        axes: str | None = None,
        model: str | None = None,
        dtype: str | None = None,
        block_tokens: int | None = None,
        total_heads: int | None = None,
        tp_rank: int | None = None,
        tp_size: int | None = None,
        pipeline: Pipeline | None = None,
        context: Context | None = None,
    ) -> BlockPool:
        """Registers existing memory: torch tensors, numpy arrays, or any object with DLPack.

        All tensors must be on the CPU, or all on the same CUDA device.

        axes: names the dimensions of the tensors, from whose shapes, strides and dtype the layout is derived. It is
            "flash-attention", "flashinfer-nhd", "mla", …, or words such as "K/V blocks tokens heads row" for one
            tensor per layer of [2, N, block, H, D]. See kvlink.transfer.axes.
        model, dtype, total_heads, tp_rank, tp_size: fields of the derived layout. The defaults are the dtype of the
            tensors, and ranks that share the heads evenly.
        pipeline, context: the layers and the tokens that this rank has, by default all.
        block_tokens: the tokens of a block, required for a dimension of slots, "blocks*tokens".
        layout: describes the memory instead of axes. Region i is `tensors[i]`, and offsets count from its first
            element. The number of tensors, the item size and every stride are compared with it. One-dimensional uint8
            tensors are accepted as regions of exactly the layout's size, and are required with several layouts.

        The transports cma and tcp reach a pool on the CPU, but shm does not. On a GPU, cuda and verbs reach it, and tcp
        stages it in host memory. No transport waits for CUDA streams, so offer blocks after the kernels that wrote
        them have ended. Raises ConfigError, naming the tensor and the axis, for tensors that differ from the layout,
        overlap, are read-only, or are on another device.
        """
        views = views_of(tensors)
        options = {
            "model": model,
            "dtype": dtype,
            "block_tokens": block_tokens,
            "total_heads": total_heads,
            "tp_rank": tp_rank,
            "tp_size": tp_size,
            "pipeline": pipeline,
            "context": context,
        }
        passed: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        if layout is None:
            layout = layout_of(views, _required(axes), **passed)
        elif axes is not None or passed:
            names = ", ".join([*(["axes"] if axes is not None else []), *passed])
            raise ConfigError(
                f"from_tensors takes a layout or {names}, not both; the layout contains all of it"
            )
        check_tensors(views, checked_groups(layout))
        return cls(
            [Region(view.address, view.num_bytes, view.keeper, None, view.gpu) for view in views], layout
        )

    def __repr__(self) -> str:
        """Describes the size and the kind of the memory."""
        gib = sum(region.num_bytes for region in self.regions) / 2**30
        kind = "kvlink's" if self.mappable else "registered" if self.gpu is None else f"cuda:{self.gpu}"
        groups = f" of {len(self.groups)} cache groups" if len(self.groups) > 1 else ""
        regions = f"{len(self.regions)} {kind} region(s), {gib:.3f} GiB"
        return f"BlockPool({self.layout.num_blocks} blocks{groups} in {regions})"

    @property
    def mappable(self) -> bool:
        """Whether readers on the same host can map every region."""
        return all(region.memory is not None for region in self.regions)

    def placements(self, driver: Driver | None = None) -> tuple[Placement, ...]:
        """Returns device, PCI address, and allocations (range, kind, granularity) of each region on a GPU.

        The result is empty for host memory. `driver` asks CUDA, by default through cuda-python. Raises
        TransportUnavailable without it.
        """
        if self.gpu is None:
            return ()
        driver = driver or CudaDriver()
        return tuple(placed(driver, region.address, region.num_bytes) for region in self.regions)

    def numpy(self, region: int = 0) -> npt.NDArray[np.uint8]:
        """Returns a writable view of one region with shape [bytes], without a copy. Raises ConfigError on a GPU."""
        if self.gpu is not None:
            raise ConfigError(
                f"numpy cannot view cuda:{self.gpu}; use pool.torch(), or copy it to the CPU first"
            )
        return np.asarray(_Exported(self.regions[region]))

    @property
    def gpu(self) -> int | None:
        """CUDA's number of the device that holds the pool, or None for host memory."""
        return self.regions[0].gpu if self.regions else None

    def torch(self, region: int = 0) -> torch.Tensor:
        """Returns a uint8 tensor of one region with shape [bytes], without a copy. Use `.view(dtype)`. Needs torch."""
        import torch

        keeper, num_bytes = self.regions[region].keeper, self.regions[region].num_bytes
        if not isinstance(keeper, torch.Tensor):
            if self.gpu is not None:
                return torch.as_tensor(_Exported(self.regions[region]), device=f"cuda:{self.gpu}")
            return torch.from_numpy(self.numpy(region))
        first = keeper.storage_offset() * keeper.element_size()
        flat = torch.empty(0, dtype=torch.uint8, device=keeper.device)
        return flat.set_(keeper.untyped_storage(), first, (num_bytes,), (1,))

    def __dlpack__(self, **options: Any) -> Any:
        """Returns region 0 as uint8, for `from_dlpack`."""
        return self._first().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the kind and the number of the device in DLPack's numbering."""
        kind, number = self._first().__dlpack_device__()
        return int(kind), int(number)

    def _first(self) -> Any:
        return self.numpy() if self.gpu is None else self.torch()


class _Exported:
    """Exports a region through numpy's or CUDA's array interface. The view keeps this object, and so the memory."""

    def __init__(self, region: Region) -> None:
        self._region = region
        interface = "__array_interface__" if region.gpu is None else "__cuda_array_interface__"
        about = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }
        setattr(self, interface, about)


def _on_host(num_bytes: int, huge_pages: bool) -> Region:
    memory = _core.HostMemory(num_bytes, huge_pages)
    return Region(memory.address, num_bytes, memory, memory)


def _on_gpu(num_bytes: int, gpu: int) -> Region:
    memory = _core.CudaMemory(num_bytes, gpu)
    return Region(memory.address, num_bytes, memory, None, gpu)


def _required(axes: str | None) -> str:
    if axes is None:
        raise ConfigError(
            "from_tensors needs the names of the dimensions: pass axes= as words in the order of the shape, or as one "
            f"of {named_shapes()}; or pass a layout"
        )
    return axes
