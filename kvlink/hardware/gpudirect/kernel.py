# SPDX-License-Identifier: Apache-2.0
"""Reads from the kernel what GPUDirect depends on: its version, nvidia-peermem, and the size of a GPU's BAR1."""

from __future__ import annotations

import re
from pathlib import Path

from kvlink.hardware.sysfs import read
from kvlink.hardware.topology.pci import DEVICES

# nvidia_peermem ships with the driver. The other paths belong to its predecessors.
_PEERMEM = {
    "nvidia_peermem": "sys/module/nvidia_peermem",
    "nv_peer_mem": "sys/module/nv_peer_mem",
    "memory_peers/nv_mem": "sys/kernel/mm/memory_peers/nv_mem",
}
_NUM_BARS = 6


def kernel_version(root: Path) -> tuple[int, int]:
    """Returns (major, minor) of the kernel, or (0, 0) if it is unknown."""
    found = re.match(r"(\d+)\.(\d+)", read(root, "proc/sys/kernel/osrelease"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def peermem_module(root: Path) -> str:
    """Returns the name of the loaded peer memory module, or ""."""
    return next((name for name, mark in _PEERMEM.items() if (root / mark).is_dir()), "")


def bar1_bytes(root: Path, bus_id: str) -> int | None:
    """Returns the bytes of the window through which other devices reach the memory of a GPU, its second memory BAR.

    Returns None if the GPU is absent or has no second memory BAR. `bus_id` has the form of sysfs, 0000:1b:00.0.
    """
    sizes = []
    for line in read(root, f"{DEVICES}/{bus_id}/resource").splitlines()[:_NUM_BARS]:
        first, end, _ = (int(number, 16) for number in line.split())
        if end > first:
            sizes.append(end - first + 1)
    return sizes[1] if len(sizes) > 1 else None
