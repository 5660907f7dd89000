# SPDX-License-Identifier: Apache-2.0
"""Reads address, shape, strides in bytes, item and device of torch tensors, numpy arrays and DLPack objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvlink.errors import ConfigError

if TYPE_CHECKING:
    import torch

_DLPACK_HOST = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA = 2  # kDLCUDA
_DLPACK_OTHERS = {
    8: "Metal",
    10: "ROCm (AMD)",
    12: "an NPU or another extension",
    13: "CUDA managed",
    14: "oneAPI (XPU)",
}
_BYTE_TYPES = ("uint8", "int8")


class Dim(NamedTuple):
    """One dimension of a tensor. `position` counts from 0 in the tensor's shape; `stride` is in bytes."""

    position: int
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor. `keeper` keeps the memory alive. `gpu` is CUDA's number of its device, or None for host memory."""

    name: str
    """The name of the tensor in errors, for example "tensors[3]"."""
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """The strides in bytes."""
    item_bytes: int
    dtype: str
    keeper: object
    gpu: int | None = None

    def __str__(self) -> str:
        """Returns name, dtype, shape and strides for errors."""
        return f"{self.name} ({self.dtype}, shape {list(self.shape)}, strides {list(self.strides)} bytes)"

    @property
    def dims(self) -> list[Dim]:
        """The dimensions that have more than one element, by ascending stride."""
        rows = [
            Dim(position, *row) for position, row in enumerate(zip(self.shape, self.strides, strict=True))
        ]
        return sorted((dim for dim in rows if dim.size > 1), key=lambda dim: dim.stride)

    @property
    def num_bytes(self) -> int:
        """Bytes from the first byte to the end of the last item."""
        return self.item_bytes + sum((dim.size - 1) * dim.stride for dim in self.dims)

    @property
    def has_byte_items(self) -> bool:
        """Whether an item is one byte, which may be a part of a value of any dtype."""
        return self.dtype in _BYTE_TYPES

    @property
    def is_byte_buffer(self) -> bool:
        """Whether the tensor is one contiguous run of bytes without a shape."""
        return self.has_byte_items and len(self.shape) == 1 and self.strides == (1,)

    @property
    def device(self) -> str:
        """The device in torch's notation."""
        return "cpu" if self.gpu is None else f"cuda:{self.gpu}"


def views_of(tensors: Sequence[Any]) -> list[TensorView]:
    """Returns a view of each tensor. Raises ConfigError, naming the tensor, for memory that a pool cannot use."""
    if hasattr(tensors, "shape"):
        raise ConfigError("from_tensors takes a list of tensors; write [tensor] for a single one")
    views = [_view_of(f"tensors[{index}]", tensor) for index, tensor in enumerate(tensors)]
    if not views:
        raise ConfigError("from_tensors needs at least one tensor")
    for view in views:
        if view.gpu != views[0].gpu:
            raise ConfigError(
                f"the tensors are on several devices: {view.name} is on {view.device}, {views[0].name} on "
                f"{views[0].device}; make one pool, and Worker, per GPU"
            )
    return views


def _view_of(name: str, tensor: Any) -> TensorView:
    if hasattr(tensor, "untyped_storage"):
        return _of_torch(name, tensor)
    if isinstance(tensor, np.ndarray):
        return _of_numpy(name, tensor)
    if not hasattr(tensor, "__dlpack_device__"):
        raise ConfigError(
            f"{name} is a {type(tensor).__name__}; a pool takes torch tensors, numpy arrays, and objects with DLPack"
        )
    device = int(tensor.__dlpack_device__()[0])
    if device == _DLPACK_CUDA:
        return _of_torch(name, _as_torch(tensor))
    if device not in _DLPACK_HOST:
        raise ConfigError(
            f"{name}: pools take arrays on the CPU or on CUDA devices, and this one has DLPack device type {device}, "
            f"{_DLPACK_OTHERS.get(device, 'which is unknown')}"
        )
    try:
        return _of_numpy(name, np.from_dlpack(tensor))
    except (BufferError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{name}: numpy cannot take it over DLPack ({error}); pass a torch tensor"
        ) from None


def _of_numpy(name: str, array: np.ndarray[Any, Any]) -> TensorView:
    if array.dtype.hasobject:
        raise ConfigError(f"{name} holds Python objects; a pool needs plain memory")
    if not array.flags.writeable:
        raise ConfigError(f"{name}: a pool needs writable memory; this array is read-only")
    if array.size == 0 or any(stride < 0 for stride in array.strides):
        raise ConfigError(f"{name}: a pool needs non-empty arrays without negative strides")
    return _own_memory(
        TensorView(
            name, array.ctypes.data, array.shape, array.strides, array.itemsize, array.dtype.name, array
        )
    )


def _as_torch(tensor: Any) -> torch.Tensor:
    try:
        from torch.utils import dlpack
    except ImportError:
        raise ConfigError("GPU memory with DLPack needs torch: pip install 'kvlink[torch]'") from None
    return dlpack.from_dlpack(tensor)


def _of_torch(name: str, tensor: torch.Tensor) -> TensorView:
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"{name}: pools take tensors on the CPU or on CUDA devices, and this one is on {tensor.device}"
        )
    if str(tensor.layout) != "torch.strided":
        raise ConfigError(f"{name}: a pool needs dense tensors, this one is {tensor.layout}")
    if tensor.numel() == 0:
        raise ConfigError(f"{name}: a pool needs non-empty tensors")
    item_bytes = tensor.element_size()
    return _own_memory(
        TensorView(
            name,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tuple(stride * item_bytes for stride in tensor.stride()),
            item_bytes,
            str(tensor.dtype).removeprefix("torch."),
            tensor,
            tensor.device.index if tensor.device.type == "cuda" else None,
        )
    )


def _own_memory(view: TensorView) -> TensorView:
    """Returns the same view. Raises ConfigError if two of its elements share memory, as after `expand`."""
    extent = view.item_bytes
    for dim in view.dims:
        if dim.stride < extent:
            raise ConfigError(
                f"{view}: the elements of dimension {dim.position} overlap: its stride is {dim.stride} bytes and each "
                f"has {extent}"
            )
        extent += (dim.size - 1) * dim.stride
    return view
