# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a pull as start-up + operations + bytes, with one model per transport that pulls refine."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

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


# First guesses until pulls from the peer correct them: medians of `kvlink bench pull` on a 2-core cloud machine.
PRIORS = {
    "loopback": Cost(3, 40, 10),
    "shm": Cost(3, 40, 10),
    "cma": Cost(5, 100, 5),
    "tcp": Cost(35, 100, 3),
    **{name: Cost(*_core.prior_cost(name)) for name in ("verbs", "cuda")},  # assumptions, not measured
}


@dataclass(slots=True)
class FittedCost:
    """A prior that is scaled to observed pulls. Any thread may use it, and a sample lost to a race does no harm."""

    prior: Cost
    _ratios: dict[int, deque[float]] = field(default_factory=dict)
    """Measured / predicted, by size class, because small and large pulls differ from the prior by different factors."""

    def predict_us(self, num_ops: int, num_bytes: int) -> float:
        """Returns the prior, scaled by the median of measured / predicted over the last pulls of the nearest size."""
        size = num_bytes.bit_length()
        nearest = min([*self._ratios], key=lambda seen: abs(seen - size), default=None)
        ratios = sorted(self._ratios[nearest]) if nearest is not None else [1.0]
        return self.prior.predict_us(num_ops, num_bytes) * ratios[len(ratios) // 2]

    def learn(self, num_ops: int, num_bytes: int, measured_us: float) -> None:
        """Adds one finished pull."""
        ratios = self._ratios.setdefault(num_bytes.bit_length(), deque(maxlen=32))
        ratios.append(measured_us / self.prior.predict_us(num_ops, num_bytes))
