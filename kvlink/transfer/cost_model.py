# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a pull as start-up + operations + bytes.

The C++ core corrects the prior of a transport by the pulls that end, see csrc/engine/cost_model.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlink import _core


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost model: time of a pull = start_us + num_ops * op_ns / 1000 + bytes / rate. `gib_per_s` is in 2^30 bytes."""

    start_us: float
    op_ns: float
    gib_per_s: float

    def predict_us(self, num_ops: int, num_bytes: int) -> float:
        """Returns the predicted microseconds from pull() to the settle."""
        return self.start_us + num_ops * self.op_ns / 1000 + num_bytes / (self.gib_per_s * 2**30) * 1e6


PRIORS = {name: Cost(*_core.prior_cost(name)) for name in ("loopback", "shm", "cma", "tcp", "verbs", "cuda")}
"""The cost that is assumed of each transport before any pull."""
