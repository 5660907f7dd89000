# SPDX-License-Identifier: Apache-2.0
"""Implements Driver with cuda-python, which is imported when the first CudaDriver is created.

It was run with cuda-bindings 13.5 over a stand-in for libcuda that checks the arguments, but not yet with a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect.driver import Allocation, Gpu, Kind, Ordering
from kvlink.hardware.topology import normalize

_INSTALL = "pip install 'kvlink[cuda]' (kvlink[cuda12] for a driver of CUDA 12, see nvidia-smi)"
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_FLUSH_FROM_HOST = 1  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
_CONTEXT_SYNC_MEMOPS = 0x80  # CU_CTX_SYNC_MEMOPS
_PCIE_MAPPING = 1  # CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE, from CUDA 12.8 on
_BUS_ID_BYTES = 16
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: the stream waits for no other, and none for it


class CudaDriver:
    """Implements Driver. Construction raises TransportUnavailable without cuda-python or without a driver."""

    def __init__(self) -> None:
        self._cuda = _bindings()
        try:
            self._call("cuInit", 0)
        except TransportUnavailable:
            raise
        except Exception as error:  # the bindings raise their own error if the library is missing
            raise TransportUnavailable(f"no CUDA driver: {error}", "install the NVIDIA driver") from error

    def allocation(self, address: int) -> Allocation | None:
        """See Driver."""
        try:
            device = self._of_pointer("DEVICE_ORDINAL", address)
            with self._current(device):
                base, num_bytes = self._call("cuMemGetAddressRange", address)
        except TransportUnavailable:
            return None
        kind, granularity = self._kind(address)
        capable = bool(self._of_pointer("IS_GPU_DIRECT_RDMA_CAPABLE", address))
        return Allocation(int(base), int(num_bytes), device, kind, capable, granularity)

    def gpu(self, ordinal: int) -> Gpu:
        """See Driver."""
        (device,) = self._call("cuDeviceGet", ordinal)
        (bus_id,) = self._call("cuDeviceGetPCIBusId", _BUS_ID_BYTES, device)
        flush = self._of_device("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", device)
        return Gpu(
            ordinal=ordinal,
            bus_id=normalize(bus_id.partition(b"\0")[0].decode()),
            rdma=bool(self._of_device("GPU_DIRECT_RDMA_SUPPORTED", device)),
            dma_buf=bool(self._of_device("DMA_BUF_SUPPORTED", device)),
            coherent=bool(self._of_device("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES", device)),
            ordering=self._of_device("GPU_DIRECT_RDMA_WRITES_ORDERING", device),
            flush_from_host=bool(flush & _FLUSH_FROM_HOST),
        )

    def export(self, gpu: int, address: int, num_bytes: int, *, pcie: bool = False) -> int:
        """See Driver."""
        kind = self._cuda.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        with self._current(gpu):
            (fd,) = self._call(
                "cuMemGetHandleForAddressRange", address, num_bytes, kind, _PCIE_MAPPING if pcie else 0
            )
        return int(fd)

    def sync_memops(self, allocation: Allocation) -> None:
        """See Driver. VMM memory does not support the attribute of the pointer, so its whole context gets the flag."""
        attribute = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        with self._current(allocation.device):
            if allocation.kind is not Kind.VMM:
                self._call("cuPointerSetAttribute", 1, attribute, allocation.base)
                return
            (device,) = self._call("cuDeviceGet", allocation.device)
            flags, _ = self._call("cuDevicePrimaryCtxGetState", device)
            if not flags & _CONTEXT_SYNC_MEMOPS:
                self._call("cuDevicePrimaryCtxSetFlags", device, flags | _CONTEXT_SYNC_MEMOPS)

    def flush(self, gpu: int, scope: Ordering) -> None:
        """See Driver."""
        cuda = self._cuda
        target = cuda.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        with self._current(gpu):
            self._call("cuFlushGPUDirectRDMAWrites", target, cuda.CUflushGPUDirectRDMAWritesScope(int(scope)))

    def store(self, gpu: int, address: int, data: bytes) -> None:
        """See Driver. A copy from pageable memory may return before its last bytes have arrived."""
        buffer = (ctypes.c_char * len(data)).from_buffer_copy(data)
        with self._current(gpu), self._stream() as stream:
            self._call("cuMemcpyHtoDAsync", address, ctypes.addressof(buffer), len(data), stream)

    def load(self, gpu: int, address: int, num_bytes: int) -> bytes:
        """See Driver."""
        buffer = (ctypes.c_char * num_bytes)()
        with self._current(gpu), self._stream() as stream:
            self._call("cuMemcpyDtoHAsync", ctypes.addressof(buffer), address, num_bytes, stream)
        return bytes(buffer)

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        """Makes a stream, for whose copies it waits at the end."""
        (stream,) = self._call("cuStreamCreate", _NON_BLOCKING)
        try:
            yield stream
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy", stream)

    def _kind(self, address: int) -> tuple[Kind, int]:
        """Returns the kind of the memory at `address`, and the granularity of VMM memory or 0."""
        if self._of_pointer("MEMORY_TYPE", address) != _DEVICE_MEMORY:
            return Kind.HOST, 0
        if self._of_pointer("IS_MANAGED", address):
            return Kind.MANAGED, 0
        if self._of_pointer("MEMPOOL_HANDLE", address):
            return Kind.ASYNC, 0
        try:
            (handle,) = self._call("cuMemRetainAllocationHandle", address)
        except TransportUnavailable:
            return Kind.CUDA_MALLOC, 0
        try:
            (properties,) = self._call("cuMemGetAllocationPropertiesFromHandle", handle)
            least = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            (granularity,) = self._call("cuMemGetAllocationGranularity", properties, least)
        finally:
            self._call("cuMemRelease", handle)
        return Kind.VMM, int(granularity)

    @contextmanager
    def _current(self, ordinal: int) -> Iterator[None]:
        """Makes the primary context of a device, which torch uses too, current on this thread.

        Calls in it break no capture of a graph that the engine makes meanwhile on any thread.
        """
        (device,) = self._call("cuDeviceGet", ordinal)
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        (mode,) = self._call("cuThreadExchangeStreamCaptureMode", relaxed)
        try:
            (context,) = self._call("cuDevicePrimaryCtxRetain", device)
            try:
                self._call("cuCtxPushCurrent", context)
                try:
                    yield
                finally:
                    self._call("cuCtxPopCurrent")
            finally:
                self._call("cuDevicePrimaryCtxRelease", device)
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", mode)

    def _of_pointer(self, name: str, address: int) -> int:
        attribute = getattr(self._cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        (value,) = self._call("cuPointerGetAttribute", attribute, address)
        return int(value)

    def _of_device(self, name: str, device: Any) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        (value,) = self._call("cuDeviceGetAttribute", attribute, device)
        return int(value)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        error, *values = getattr(self._cuda, name)(*arguments)
        if int(error):
            raise TransportUnavailable(
                f"{name}: {getattr(error, 'name', error)}", "see dmesg and nvidia-smi -q"
            )
        return tuple(values)


def _bindings() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as missing:
        with suppress(ImportError):  # cuda-python before 12.6
            return importlib.import_module("cuda.cuda")
        raise TransportUnavailable("cuda-python is not installed", _INSTALL) from missing
