# SPDX-License-Identifier: Apache-2.0
"""Measures what the machine does on the same path without kvlink.

The code in csrc/bench, built as `kvlink._bench`, does the work and takes the time.
"""

from __future__ import annotations

import mmap
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvlink import BlockPool, WorkerConfig, _bench
from kvlink.hardware.nics import MemoryPlace, select_ports

from .block_draws import pieces_of
from .contents import Ids
from .perftest import read_bandwidth, read_latency
from .processes import OwnerSide

_LATENCY_READS, _BANDWIDTH_READS = 1000, 1000

Copy = Callable[[npt.NDArray[np.uint64]], int]


@dataclass(frozen=True, slots=True)
class Baseline:
    """One bare way of moving blocks."""

    name: str
    run: Callable[[Ids, Ids], float]
    """Takes blocks at the owner and blocks here; returns microseconds."""
    keeper: Any = None


@dataclass(frozen=True, slots=True)
class Reference:
    """Another program that measures the same path, between our transfers instead of in turns with them."""

    name: str
    run: Callable[[], float]
    """Returns the microseconds for as many bytes as one transfer has."""


def num_baselines(transport: str) -> int:
    """Returns how many baselines `baselines_of` returns."""
    return {"shm": 2, "loopback": 2, "verbs": 0}.get(transport.removeprefix("fault+"), 1)


def references_of(transport: str, block_bytes: int, blocks: int, lanes: int) -> list[Reference]:
    """Returns the installed ones for a transport. Raises ConfigError if KVLINK_NICS does not fit this machine."""
    if transport.removeprefix("fault+") != "verbs" or not shutil.which("ib_read_bw"):
        return []
    ports, *_ = select_ports(MemoryPlace(), WorkerConfig.from_env().nics)
    device = ports[0][0].partition(":")[0]
    if blocks == 1:
        return [Reference("ib_read_lat", lambda: read_latency(device, device, block_bytes, _LATENCY_READS))]
    reads = min(blocks, _BANDWIDTH_READS)

    def stream() -> float:
        mib_per_s = read_bandwidth(device, device, block_bytes, reads, qps=lanes)
        return blocks * block_bytes / 2**20 / mib_per_s * 1e6

    return [Reference("ib_read_bw", stream)]


def baselines_of(transport: str, owner: OwnerSide, pool: BlockPool) -> list[Baseline]:
    """Returns the baselines of a transport; the fastest is its limit."""
    name = transport.removeprefix("fault+")
    if name == "verbs":
        return []
    memory = memory_of(name, owner)
    copies = copies_from(name, owner)
    return [Baseline(way, _copy(copy, memory.base, pool), memory.keeper) for way, copy in copies.items()]


class Memory(NamedTuple):
    """An owner's pool: the address that a copier uses, and a reference that keeps the memory."""

    base: int
    keeper: Any = None


def memory_of(name: str, owner: OwnerSide) -> Memory:
    """Returns the memory of an owner's pool for any path except verbs."""
    found = owner.call("memory")
    if name != "shm":
        return Memory(found["address"])
    mapped = _mapping(owner.pid, found["memfd"])
    return Memory(mapped.ctypes.data, mapped)


def copies_from(name: str, owner: OwnerSide) -> dict[str, Copy]:
    """Returns the copiers from an owner's pool by name. Each is for one thread at a time."""
    if name == "tcp":
        return {"socket stream": _bench.BaselineSink(owner.call("listen")["port"]).read}
    if name == "cma":
        return {"process_vm_readv": partial(_bench.baseline_process_vm_readv, owner.pid)}
    return {"memcpy": _bench.baseline_memcpy, "non-temporal copy": _bench.baseline_streamed_copy}


def _copy(copy: Copy, base: int, pool: BlockPool) -> Callable[[Ids, Ids], float]:
    to, size = pool.regions[0].address, pool.layout.block_bytes
    return lambda from_ids, to_ids: copy(pieces_of(from_ids, to_ids, size, base, to)) / 1000


def _mapping(pid: int, memfd: int) -> npt.NDArray[np.uint8]:
    with Path(f"/proc/{pid}/fd/{memfd}").open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ), np.uint8)
