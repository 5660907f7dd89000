# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench gpu` on a GPU: a few pulls of each shape, every byte compared. What they take is not judged here."""

from __future__ import annotations

import pytest

from kvlink.benchmarks import gpu


@pytest.mark.timeout(600)
def test_every_row_is_measured_beside_its_limit() -> None:
    rows = list(gpu.rows((0, 0), "cuda", 3))
    assert [(row["block_bytes"], row["blocks"]) for row in rows] == list(gpu.SHAPES)
    assert all(row["verified"] and row["transport"] == "cuda" and row["of_limit"] > 0 for row in rows)
