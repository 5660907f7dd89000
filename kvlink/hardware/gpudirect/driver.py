# SPDX-License-Identifier: Apache-2.0
"""Defines GPU memory as the CUDA driver describes it, and the calls that exporting it needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol


class Kind(Enum):
    """Says which interface allocated the memory."""

    CUDA_MALLOC = "cudaMalloc"
    VMM = "cuMemMap (expandable segments)"
    ASYNC = "cudaMallocAsync"
    MANAGED = "cudaMallocManaged"
    HOST = "host memory"


class Ordering(IntEnum):
    """Says which devices see the writes of a NIC in order without a flush. The numbers are those of CUDA."""

    NONE = 0
    OWNER = 100
    ALL_DEVICES = 200


@dataclass(frozen=True, slots=True)
class Allocation:
    """One physical allocation. A range of VMM memory may span several consecutive ones."""

    base: int
    num_bytes: int
    device: int
    kind: Kind
    rdma_capable: bool
    granularity: int = 0
    """Mappings of VMM memory are multiples of this many bytes. 0 means that memory cannot be mapped in parts."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """The properties of one device. If `coherent`, a chip-to-chip link to the CPU reaches it too, not only BAR1."""

    ordinal: int
    bus_id: str
    rdma: bool
    dma_buf: bool
    coherent: bool
    ordering: int
    flush_from_host: bool


class Driver(Protocol):
    """The calls of the CUDA driver that exporting needs. Each raises TransportUnavailable if CUDA refuses."""

    def allocation(self, address: int) -> Allocation | None:
        """Returns the allocation that contains `address`, or None if nothing is mapped there."""

    def gpu(self, ordinal: int) -> Gpu:
        """Returns the properties of one device."""

    def export(self, gpu: int, address: int, num_bytes: int, *, pcie: bool = False) -> int:
        """Returns a new dma-buf descriptor over whole host pages. The caller owns the descriptor.

        With `pcie`, a coherent GPU maps the memory at its PCIe address.
        """

    def sync_memops(self, allocation: Allocation) -> None:
        """Makes CUDA's synchronous copies of this memory wait for the copy, because the NIC ignores streams."""

    def flush(self, gpu: int, scope: Ordering) -> None:
        """Blocks until completed writes of NICs are visible to `scope`."""

    def store(self, gpu: int, address: int, data: bytes) -> None:
        """Copies `data` to GPU memory. The bytes are there on return."""

    def load(self, gpu: int, address: int, num_bytes: int) -> bytes:
        """Copies bytes from GPU memory."""
