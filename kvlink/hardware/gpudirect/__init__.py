# SPDX-License-Identifier: Apache-2.0
"""Exports a range of GPU memory to a NIC by dma-buf, by nvidia-peermem, or through a bounce buffer in host memory.

`export` does this for one range, and `decide` is its pure part. Only CudaDriver needs cuda-python.
"""

from __future__ import annotations

from kvlink.hardware.gpudirect.cuda import CudaDriver
from kvlink.hardware.gpudirect.decision import Decision, Facts, decide
from kvlink.hardware.gpudirect.driver import Allocation, Driver, Gpu, Kind, Ordering
from kvlink.hardware.gpudirect.export import ExportedMemory, Placement, export, inspect, placed

__all__ = [
    "Allocation",
    "CudaDriver",
    "Decision",
    "Driver",
    "ExportedMemory",
    "Facts",
    "Gpu",
    "Kind",
    "Ordering",
    "Placement",
    "decide",
    "export",
    "inspect",
    "placed",
]
