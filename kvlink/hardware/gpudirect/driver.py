# SPDX-License-Identifier: Apache-2.0
"""GPU memory as the CUDA driver describes it, and the few calls that lending it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol


class Kind(Enum):
    """Who made the memory."""

    CUDA_MALLOC = "cudaMalloc"
    VMM = "cuMemMap (expandable segments)"
    ASYNC = "cudaMallocAsync"
    MANAGED = "cudaMallocManaged"
    HOST = "host memory"


class Ordering(IntEnum):
    """Who sees the writes of a NIC in order without a flush; CUDA's own numbers."""

    NONE = 0
    OWNER = 100
    ALL_DEVICES = 200


@dataclass(frozen=True, slots=True)
class Allocation:
    """One physical allocation. A range of VMM memory may lie in many, one behind the other."""

    base: int
    num_bytes: int
    device: int
    kind: Kind
    rdma_capable: bool
    granularity: int = 0
    """Bytes that mappings of VMM memory are multiples of; 0: nothing can be mapped in parts."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What CUDA says of one device. `coherent`: joined to the CPU chip to chip, so BAR1 is not its only door."""

    ordinal: int
    bus_id: str
    rdma: bool
    dma_buf: bool
    coherent: bool
    ordering: int
    flush_from_host: bool


class Driver(Protocol):
    """The calls of the CUDA driver that this module needs. Each raises TransportUnavailable when CUDA refuses."""

    def allocation(self, address: int) -> Allocation | None:
        """The allocation that holds `address`, None where nothing is mapped."""

    def gpu(self, ordinal: int) -> Gpu:
        """One device."""

    def export(self, gpu: int, address: int, num_bytes: int, pcie: bool) -> int:
        """A new dma-buf descriptor over whole host pages; the caller owns it."""

    def sync_memops(self, allocation: Allocation) -> None:
        """Makes CUDA's synchronous copies of this memory wait for the copy: the NIC does not see streams."""

    def flush(self, gpu: int, scope: Ordering) -> None:
        """Blocks until the writes of NICs that completed are visible to `scope`."""
