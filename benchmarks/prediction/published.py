# SPDX-License-Identifier: Apache-2.0
"""Predicts Mooncake's published table of vLLM prefill/decode (vllm-v1-pd-performance.md in its repository).

Qwen3-8B, TP8, two machines of eight H800 with eight ConnectX-7 (200 Gb/s of RoCE each), one request at a time. Its GB
are 2^30 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..workloads.models import BLOCK_TOKENS, MODELS
from .path import Path, Request, pcie_gbps, wire_efficiency

_TP = 8
_NIC_GBPS = 25.0


class Published(NamedTuple):
    """A row of the table."""

    tokens: int
    transfer_ms: float


TABLE = (
    Published(128, 0.54), Published(512, 0.92), Published(1024, 1.50), Published(4096, 4.75), Published(8192, 8.84),
    Published(32_768, 31.65),
)  # fmt: skip
_FITTED = (TABLE[0], TABLE[-1])
"""The two rows from which start-up and the time of a piece are taken. The other four are predicted."""


def request_of(tokens: int) -> Request:
    """Returns a request in which each rank moves one piece for each block of each plane."""
    model = MODELS["qwen3-8b"]
    planes = model.layers * model.planes_per_layer
    return Request(tokens * model.token_bytes, -(-tokens // BLOCK_TOKENS) * planes * _TP, model.layers)


def fitted_path() -> Path:
    """Returns the path whose start-up and time per piece solve the two rows exactly. All else is the hardware's."""
    few, many = (request_of(row.tokens).pieces / _TP for row in _FITTED)
    start_ms, piece_ms = np.linalg.solve([[1, few], [1, many]], [row.transfer_ms for row in _FITTED])
    wire = _NIC_GBPS * wire_efficiency(4096)
    return Path("mooncake", _TP, wire, float(start_ms) * 1e3, 0, pcie_gbps(5), rail_ns=float(piece_ms) * 1e6)


def rows() -> Iterator[dict[str, Any]]:
    """Yields the table with its prediction."""
    path = fitted_path()
    for row in TABLE:
        request = request_of(row.tokens)
        prediction = path.predict(request)
        yield {
            "tokens": row.tokens,
            "published_ms": row.transfer_ms,
            "predicted_ms": round(prediction.total_ms, 3),
            "error": round(prediction.total_ms / row.transfer_ms - 1, 3),
            "gib_per_s": round(prediction.gib_per_s(request.num_bytes), 1),
            "bottleneck": prediction.bottleneck,
            "fitted": row in _FITTED,
        }
