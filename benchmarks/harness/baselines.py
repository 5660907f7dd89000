# SPDX-License-Identifier: Apache-2.0
"""Measures what the machine does on the same path without kvlink.

The code in csrc/bench, built as `kvlink._bench`, does the work and takes the time.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvlink import WorkerConfig, _bench
from kvlink.hardware.nics import MemoryPlace, select_ports

from .perftest import read_bandwidth, read_latency
from .pieces import Pieces
from .processes import OwnerSide

_LATENCY_READS, _BANDWIDTH_READS = 1000, 1000
_LEAST_SHARED_BYTES = 256 << 10  # below, a second thread costs more than it saves

Copy = Callable[[Pieces], int]


class Memory(NamedTuple):
    """An owner's pool: the address that a copier uses, and a reference that keeps the memory."""

    base: int
    keeper: Any = None


class Baseline(NamedTuple):
    """One bare way of moving blocks, on so many threads, or over so many streams."""

    name: str
    copy: Copy
    """Takes pieces (pieces.py); returns ns."""
    memory: Memory
    """The owner's, from where it copies."""


class Reference(NamedTuple):
    """Another program that measures the same path, between our transfers instead of in turns with them."""

    name: str
    run: Callable[[], float]
    """Returns the microseconds for as many bytes as one transfer has."""


_BY_NIC = ("verbs", "fabric")
"""Transports that reach memory which this process does not: they have no limit by a copy."""


def thread_counts(num_bytes: int) -> tuple[int, ...]:
    """Returns on how many threads a limit is measured: one, and for larger transfers as many as kvlink may use.

    That is a lane each, and a helper that copies where a core is idle.
    """
    most = min(len(os.sched_getaffinity(0)), max(2, WorkerConfig.from_env().lanes))
    return (1,) if num_bytes < _LEAST_SHARED_BYTES or most == 1 else (1, most)


def ways_of(transport: str, threads: Sequence[int]) -> list[str]:
    """Returns the names of the limits of a transport."""
    name = transport.removeprefix("fault+")
    names = {"tcp": ["socket stream"], "cma": ["process_vm_readv"]}
    found = [] if name in _BY_NIC else names.get(name, ["memcpy", "non-temporal copy"])
    return [name if count == 1 else f"{name}, {count} threads" for name in found for count in threads]


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


def baselines_of(transport: str, owner: OwnerSide, threads: Sequence[int] = (1,)) -> list[Baseline]:
    """Returns the baselines of a transport; the fastest is its limit."""
    name = transport.removeprefix("fault+")
    memory = memory_of(name, owner)
    return [Baseline(way, copy, memory) for way, copy in copies_from(name, owner, threads).items()]


def memory_of(name: str, owner: OwnerSide) -> Memory:
    """Returns the memory of an owner's pool for any path."""
    found = owner.call("memory")
    if name != "shm":
        return Memory(found["address"])
    mapped = _mapping(owner.pid, found["memfd"])
    return Memory(mapped.ctypes.data, mapped)


def copies_from(name: str, owner: OwnerSide, threads: Sequence[int] = (1,)) -> dict[str, Copy]:
    """Returns the copiers from an owner's pool, in the order of `ways_of`. Each is for one thread at a time."""
    if name in _BY_NIC:
        copies: list[Copy] = []
    elif name == "tcp":
        port = owner.call("listen")["port"]
        streams = [[_bench.BaselineSink(port) for _ in range(count)] for count in threads]
        copies = [partial(_bench.BaselineSink.read_at_once, sinks) for sinks in streams]
    elif name == "cma":
        copies = [partial(_bench.baseline_process_vm_readv, owner.pid, threads=count) for count in threads]
    else:
        plain = (_bench.baseline_memcpy, _bench.baseline_streamed_copy)
        copies = [partial(copy, threads=count) for copy in plain for count in threads]
    return dict(zip(ways_of(name, threads), copies, strict=True))


def _mapping(pid: int, memfd: int) -> npt.NDArray[np.uint8]:
    with Path(f"/proc/{pid}/fd/{memfd}").open("rb") as file:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return np.frombuffer(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ), np.uint8)
