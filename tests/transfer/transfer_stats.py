# SPDX-License-Identifier: Apache-2.0
"""Statistics of transfers that tests make up."""

from __future__ import annotations

from typing import NamedTuple


class TransferStats(NamedTuple):
    """As the core has them: `kvlink._core.TransferStats`."""

    bytes: int = 0
    num_ops: int = 0
    num_segments: int = 0
    plan_ns: int = 0
    post_ns: int = 0
    read_ns: int = 0
    validate_ns: int = 0
    settle_ns: int = 0
    total_ns: int = 0
    ran_inline: bool = False
    staged: bool = False
    direct_us: float = 0.0
    staged_us: float = 0.0
    predicted_us: float = 0.0
