# SPDX-License-Identifier: Apache-2.0
"""How a range of GPU memory is lent to a NIC: by dma-buf, by nvidia-peermem, or through a host bounce buffer.

`lend` is the whole of it for a pool; `decide` is its pure half. CudaDriver is the only part that needs cuda-python.
"""

from __future__ import annotations

from kvlink.gpudirect.cuda import CudaDriver
from kvlink.gpudirect.decision import Decision, Facts, Refusal, Way, decide, parse_ways
from kvlink.gpudirect.driver import Allocation, Driver, Gpu, Kind, Ordering
from kvlink.gpudirect.lending import Lent, Placement, inspect, lend, placed

__all__ = [
    "Allocation",
    "CudaDriver",
    "Decision",
    "Driver",
    "Facts",
    "Gpu",
    "Kind",
    "Lent",
    "Ordering",
    "Placement",
    "Refusal",
    "Way",
    "decide",
    "inspect",
    "lend",
    "parse_ways",
    "placed",
]
