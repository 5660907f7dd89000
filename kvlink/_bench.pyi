# SPDX-License-Identifier: Apache-2.0
"""Measures what the machine does without kvlink. Its users: benchmarks and their tests."""

from collections.abc import Callable, Sequence
from typing import Any

from kvlink._core import CudaKernel, CudaMemory, HostMemory, Plan

def call_rounds(call: Callable[[], object], rounds: int) -> None:
    """Calls a function so many times, within one function of C++."""

def baseline_memfd(memory: HostMemory) -> int:
    """The descriptor behind a pool, for a bare mapping in another process. Stays owned by `memory`."""

def baseline_memcpy(pieces: Any, threads: int = 1) -> int:
    """Nanoseconds of memcpy. Pieces are rows of uint64: address from, address to, bytes. The threads begin together."""

def baseline_streamed_copy(pieces: Any, threads: int = 1) -> int:
    """Nanoseconds of copies with non-temporal stores."""

def baseline_process_vm_readv(pid: int, pieces: Any, threads: int = 1) -> int:
    """Nanoseconds of bare system calls; `from` is an address of process `pid`."""

def time_bounce(
    memory: CudaMemory, piece_bytes: int, to_device: bool, kernel: CudaKernel | None
) -> tuple[int, int]:
    """ns that all of `memory` takes through slots of a bounce buffer, and as plain copies of pinned memory.

    Raises TransportUnavailable without CUDA.
    """

def baseline_cuda_copies(pieces: Any) -> int:
    """Nanoseconds of one copy by the GPU's driver each, and of the wait for all. Raises TransportUnavailable."""

class BaselineSource:
    """Sends pieces of `memory` over bare sockets of the loopback interface, on a thread for every sink."""

    def __init__(self, memory: HostMemory) -> None: ...
    @property
    def port(self) -> int: ...
    def close(self) -> None: ...

class BaselineSink:
    """One bare socket to a BaselineSource of any process of this host."""

    def __init__(self, port: int) -> None: ...
    def read(self, pieces: Any) -> int:
        """Nanoseconds from asking to the last byte; `from` is an address of the source's process. Releases the GIL."""
    @staticmethod
    def read_at_once(sinks: Sequence[BaselineSink], pieces: Any) -> int:
        """As `read`, over several streams that begin together, with a thread and a share of the bytes each."""

def sweep_ns(num_slots: int, num_leases: int, rounds: int) -> int:
    """CPU nanoseconds of a sweep of a lease table, the least of `rounds`. Readers of the leases out do nothing."""

def grant_at_ns(num_slots: int, num_leases: int, rounds: int) -> int:
    """CPU nanoseconds of a grant at a chosen seat, the least of `rounds`, with so many leases out already."""

def vain_revoke_ns(num_slots: int, num_leases: int, rounds: int) -> int:
    """CPU nanoseconds of a revoke of 1,000 blocks that none of the soft leases out covers, the least of `rounds`."""

def revoke_ns(num_slots: int, num_leases: int, rounds: int) -> int:
    """CPU nanoseconds of a revoke of one block that ends a soft lease of 256 blocks, the least of `rounds`."""

def post_ns(plan: Plan, rounds: int) -> int:
    """CPU nanoseconds of posting all of it to a queue pair without a NIC; absent in builds without verbs."""
