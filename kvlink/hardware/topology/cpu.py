# SPDX-License-Identifier: Apache-2.0
"""Reads sockets, cores, caches, and NUMA nodes with their memory and huge pages."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from kvlink.hardware.sysfs import numbered, parse_list, parse_size, read, read_field, read_int

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"


@dataclass(frozen=True, slots=True)
class CacheLevel:
    """All caches of one level and kind. There are `num` caches of `bytes` each, and `num_threads` share one."""

    level: int
    kind: str
    """Data, Instruction or Unified."""
    bytes: int
    num: int
    num_threads: int


@dataclass(frozen=True, slots=True)
class HugePages:
    """Reserved pages of one size."""

    page_bytes: int
    num: int
    num_free: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One memory domain. `distances` are the kernel's relative costs to every node, 10 for this one."""

    id: int
    cpus: tuple[int, ...]
    memory_bytes: int
    free_bytes: int
    distances: tuple[int, ...]
    huge_pages: tuple[HugePages, ...]


@dataclass(frozen=True, slots=True)
class Cpus:
    """The processors of a machine."""

    model: str
    num_sockets: int
    num_cores: int
    num_threads: int
    caches: tuple[CacheLevel, ...]


def cpus(root: Path) -> Cpus:
    """Reads the processors under `root`. Absent files give zeros and "unknown"."""
    online = parse_list(read(root, f"{_CPUS}/online"))
    return Cpus(
        model=read_field(root, "proc/cpuinfo", "model name") or "unknown",
        num_sockets=max(1, len(_distinct(root, online, "topology/physical_package_id"))),
        num_cores=len(_distinct(root, online, "topology/thread_siblings_list")) or len(online),
        num_threads=len(online),
        caches=_cache_levels(root, online),
    )


def numa_nodes(root: Path) -> tuple[NumaNode, ...]:
    """Returns the NUMA nodes by number. A kernel without NUMA support gives one node with all CPUs."""
    found = tuple(_numa_node(root, number) for number in numbered(root, _NODES, "node"))
    return found or (_only_node(root),)


def _distinct(root: Path, online: tuple[int, ...], path: str) -> set[str]:
    return {read(root, f"{_CPUS}/cpu{cpu}/{path}") for cpu in online} - {""}


def _cache_levels(root: Path, online: tuple[int, ...]) -> tuple[CacheLevel, ...]:
    caches = set()
    for cpu in online:
        for index in numbered(root, f"{_CPUS}/cpu{cpu}/cache", "index"):
            at = f"{_CPUS}/cpu{cpu}/cache/index{index}"
            sharers = parse_list(read(root, f"{at}/shared_cpu_list"))
            size = parse_size(read(root, f"{at}/size"))
            caches.add((read_int(root, f"{at}/level") or 0, read(root, f"{at}/type"), size, sharers))
    kinds = Counter((level, kind, size, len(sharers)) for level, kind, size, sharers in caches)
    return tuple(
        CacheLevel(level, kind, size, num, num_threads)
        for (level, kind, size, num_threads), num in sorted(kinds.items())
    )


def _numa_node(root: Path, number: int) -> NumaNode:
    at = f"{_NODES}/node{number}"
    return NumaNode(
        id=number,
        cpus=parse_list(read(root, f"{at}/cpulist")),
        memory_bytes=parse_size(read_field(root, f"{at}/meminfo", f"Node {number} MemTotal")),
        free_bytes=parse_size(read_field(root, f"{at}/meminfo", f"Node {number} MemFree")),
        distances=tuple(map(int, read(root, f"{at}/distance").split())),
        huge_pages=_huge_pages(root, f"{at}/hugepages"),
    )


def _only_node(root: Path) -> NumaNode:
    return NumaNode(
        id=0,
        cpus=parse_list(read(root, f"{_CPUS}/online")),
        memory_bytes=parse_size(read_field(root, "proc/meminfo", "MemTotal")),
        free_bytes=parse_size(read_field(root, "proc/meminfo", "MemFree")),
        distances=(10,),
        huge_pages=_huge_pages(root, "sys/kernel/mm/hugepages"),
    )


def _huge_pages(root: Path, at: str) -> tuple[HugePages, ...]:
    return tuple(
        HugePages(
            page_bytes=size << 10,
            num=read_int(root, f"{at}/hugepages-{size}kB/nr_hugepages") or 0,
            num_free=read_int(root, f"{at}/hugepages-{size}kB/free_hugepages") or 0,
        )
        for size in numbered(root, at, "hugepages-", "kB")
    )
