# SPDX-License-Identifier: Apache-2.0
"""A CUDA driver that is a list of allocations."""

from __future__ import annotations

import ctypes
import os

from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import Allocation, Gpu, Kind, Ordering

HOPPER = Gpu(0, "0000:1b:00.0", True, True, False, Ordering.ALL_DEVICES, True)


class FakeCuda:
    """A driver whose memory is a list of allocations. Descriptors are real ones."""

    def __init__(self, gpu: Gpu, *allocations: Allocation) -> None:
        self.device = gpu
        self.allocations = allocations
        self.synced: list[int] = []
        self.exported: list[tuple[int, int]] = []
        self.flushed: list[Ordering] = []
        self.refuses_sync = False
        self.exports_left = 1000
        self.exports_pcie = True
        self.exported_pcie: list[tuple[int, int]] = []

    def allocation(self, address: int) -> Allocation | None:
        return next((a for a in self.allocations if a.base <= address < a.base + a.num_bytes), None)

    def gpu(self, ordinal: int) -> Gpu:
        assert ordinal == self.device.ordinal
        return self.device

    def export(self, gpu: int, address: int, num_bytes: int, *, pcie: bool = False) -> int:
        if pcie:
            if not self.exports_pcie:
                raise TransportUnavailable("cuMemGetHandleForAddressRange: CUDA_ERROR_INVALID_VALUE")
            self.exported_pcie.append((address, num_bytes))
            return os.memfd_create("dma-buf-pcie")
        if len(self.exported) == self.exports_left:
            raise TransportUnavailable("cuMemGetHandleForAddressRange: CUDA_ERROR_OUT_OF_MEMORY")
        self.exported.append((address, num_bytes))
        return os.memfd_create("dma-buf")

    def sync_memops(self, allocation: Allocation) -> None:
        if self.refuses_sync:
            raise TransportUnavailable("cuPointerSetAttribute: CUDA_ERROR_INVALID_VALUE")
        self.synced.append(allocation.base)

    def flush(self, gpu: int, scope: Ordering) -> None:
        self.flushed.append(scope)

    def store(self, gpu: int, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def load(self, gpu: int, address: int, num_bytes: int) -> bytes:
        return ctypes.string_at(address, num_bytes)


def at(
    base: int, num_bytes: int, kind: Kind = Kind.CUDA_MALLOC, device: int = 0, capable: bool = True
) -> Allocation:
    return Allocation(base, num_bytes, device, kind, capable)
