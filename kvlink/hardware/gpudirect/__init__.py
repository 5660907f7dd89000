# SPDX-License-Identifier: Apache-2.0
"""How a range of GPU memory is exported to a NIC: by dma-buf, by nvidia-peermem, or through a host bounce buffer.

`lend` is the whole of it for a pool; `decide` is its pure half. CudaDriver is the only part that needs cuda-python.
"""

from __future__ import annotations

from kvlink.hardware.gpudirect.cuda import CudaDriver
from kvlink.hardware.gpudirect.decision import Decision, Facts, Refusal, decide
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
    "Refusal",
    "decide",
    "export",
    "inspect",
    "placed",
]
