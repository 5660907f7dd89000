# SPDX-License-Identifier: Apache-2.0
"""The paths of the simulator's tests: one model's requests over RDMA, staging copies, TCP, and slower variants."""

from __future__ import annotations

from dataclasses import replace

from kvlink.benchmarks.prediction.paths import Machine
from kvlink.benchmarks.simulation.fleets import path_of
from kvlink.benchmarks.workloads.models import MODELS
from kvlink.transfer.cost_model import Cost

MODEL = MODELS["llama-3.1-70b"]
COST = Cost(start_us=35, op_ns=100, gib_per_s=3)
_DIRECT, *_STAGED = Machine(nics=8).paths(8)[:2]
PATHS = [
    _DIRECT,
    *_STAGED,
    path_of("tcp", COST, MODEL, 8),
    replace(_DIRECT, name="slow posting", post_ns=1000),
    replace(_DIRECT, name="slow NIC", rail_ns=1000),
    replace(_DIRECT, name="small window", window=2),
]
