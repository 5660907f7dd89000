# SPDX-License-Identifier: Apache-2.0
"""Topology on copied kernel trees: a small VM, a two-socket server, a kernel without NUMA."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlink.hardware.sysfs import parse_list, parse_size, read, read_field, read_int
from kvlink.hardware.topology import CacheLevel, HugePages, discover


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def cpu(number: int, package: int, siblings: str, caches: list[tuple[int, str, str, str]]) -> dict[str, str]:
    at = f"sys/devices/system/cpu/cpu{number}"
    files = {
        f"{at}/topology/physical_package_id": str(package),
        f"{at}/topology/thread_siblings_list": siblings,
    }
    for index, (level, kind, size, shared) in enumerate(caches):
        files[f"{at}/cache/index{index}/level"] = str(level)
        files[f"{at}/cache/index{index}/type"] = kind
        files[f"{at}/cache/index{index}/size"] = size
        files[f"{at}/cache/index{index}/shared_cpu_list"] = shared
    return files


def node(
    number: int, cpus: str, memory_kib: int, free_kib: int, distance: str, huge: int = 0
) -> dict[str, str]:
    at = f"sys/devices/system/node/node{number}"
    return {
        f"{at}/cpulist": cpus,
        f"{at}/distance": distance,
        f"{at}/meminfo": (
            f"Node {number} MemTotal:       {memory_kib} kB\nNode {number} MemFree:        {free_kib} kB"
        ),
        f"{at}/hugepages/hugepages-2048kB/nr_hugepages": str(huge),
        f"{at}/hugepages/hugepages-2048kB/free_hugepages": str(huge // 2),
    }


@pytest.fixture
def small_vm(tmp_path: Path) -> Path:
    write(tmp_path, {"sys/devices/system/cpu/online": "0-1", "proc/cpuinfo": "model name\t: Tiny CPU"})
    for number in range(2):
        private = [(1, "Data", "32K", f"{number}"), (2, "Unified", "1024K", f"{number}")]
        write(tmp_path, cpu(number, 0, f"{number}", [*private, (3, "Unified", "32768K", "0-1")]))
    write(tmp_path, node(0, "0-1", 8 << 20, 4 << 20, "10"))
    write(tmp_path, {"sys/devices/system/node/has_cpu": "0", "sys/devices/system/cpu/cpufreq/x": ""})
    return tmp_path


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of two cores of two threads; CPU n and n+4 share a core; CPU 7 is offline."""
    write(tmp_path, {"sys/devices/system/cpu/online": "0-6", "proc/cpuinfo": "model name : Big CPU"})
    for number in range(7):
        core, socket = number % 4, number % 4 // 2
        siblings = f"{core},{core + 4}" if core != 3 else "3"
        l3 = "0-1,4-5" if socket == 0 else "2-3,6"
        write(
            tmp_path, cpu(number, socket, siblings, [(1, "Data", "48K", siblings), (3, "Unified", "2M", l3)])
        )
    write(tmp_path, node(0, "0-1,4-5", 64 << 20, 32 << 20, "10 21", huge=16))
    write(tmp_path, node(1, "2-3,6", 64 << 20, 16 << 20, "21 10"))
    return tmp_path


@pytest.fixture
def without_numa(tmp_path: Path) -> Path:
    write(
        tmp_path,
        {
            "sys/devices/system/cpu/online": "0-3",
            "proc/meminfo": "MemTotal:        4096 kB\nMemFree:         1024 kB",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "3",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0",
        },
    )
    return tmp_path


def test_a_small_vm(small_vm: Path) -> None:
    found = discover(small_vm)
    assert (found.cpu_model, found.num_sockets, found.num_cores, found.num_threads) == ("Tiny CPU", 1, 2, 2)
    assert found.caches == (
        CacheLevel(1, "Data", 32 << 10, num=2, num_threads=1),
        CacheLevel(2, "Unified", 1 << 20, num=2, num_threads=1),
        CacheLevel(3, "Unified", 32 << 20, num=1, num_threads=2),
    )
    (only,) = found.nodes
    assert (only.cpus, only.memory_bytes, only.free_bytes) == ((0, 1), 8 << 30, 4 << 30)


def test_two_sockets(two_sockets: Path) -> None:
    found = discover(two_sockets)
    assert (found.num_sockets, found.num_cores, found.num_threads) == (2, 4, 7)
    first, second = found.nodes
    assert (first.id, first.cpus, first.distances) == (0, (0, 1, 4, 5), (10, 21))
    assert first.huge_pages == (HugePages(2 << 20, num=16, num_free=8),)
    assert (second.id, second.cpus, second.free_bytes) == (1, (2, 3, 6), 16 << 30)
    assert {(c.level, c.num, c.num_threads) for c in found.caches} == {
        (1, 3, 2), (1, 1, 1), (3, 1, 4), (3, 1, 3),
    }  # fmt: skip


def test_a_kernel_without_numa_is_one_node(without_numa: Path) -> None:
    found = discover(without_numa)
    assert (found.num_sockets, found.num_cores, found.cpu_model) == (1, 4, "unknown")
    (only,) = found.nodes
    assert (only.id, only.cpus, only.memory_bytes, only.free_bytes) == (0, (0, 1, 2, 3), 4 << 20, 1 << 20)
    assert [(pages.page_bytes, pages.num, pages.num_free) for pages in only.huge_pages] == [
        (2 << 20, 3, 1),
        (1 << 30, 0, 0),
    ]


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    found = discover(tmp_path)
    assert (found.num_sockets, found.num_cores, found.num_threads, found.caches) == (1, 0, 0, ())


def test_this_machine_has_what_it_runs_on() -> None:
    found = discover()
    assert 1 <= found.num_sockets <= found.num_cores <= found.num_threads
    assert sum(node.memory_bytes for node in found.nodes) > 0


def test_kernel_formats() -> None:
    assert parse_list("0-2,8") == (0, 1, 2, 8)
    assert parse_list("") == ()
    assert [parse_size(text) for text in ("32K", "16384 kB", "2M", "1G", "17", "")] == [
        32 << 10, 16 << 20, 2 << 20, 1 << 30, 17, 0,
    ]  # fmt: skip


def test_absent_files_read_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a: 1\nwords\n")
    assert read(tmp_path, "nowhere") == ""
    assert read(tmp_path, ".") == ""
    assert read_int(tmp_path, "nowhere") is None
    assert read_int(tmp_path, "text") is None
    assert read_field(tmp_path, "text", "a") == "1"
    assert read_field(tmp_path, "text", "words") == ""
