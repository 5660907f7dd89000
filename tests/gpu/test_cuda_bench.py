# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench gpu` on a GPU: a few pulls of each shape, every byte compared. What they take is not judged here."""

from __future__ import annotations

import pytest

from kvlink.benchmarks.measurements import gpu, gpu_decode


@pytest.mark.timeout(600)
def test_every_row_is_measured_beside_its_limit() -> None:
    rows = list(gpu.rows((0, 0), "cuda", 3))
    assert [(row["piece_bytes"], row["pieces"]) for row in rows] == [
        (shape.piece_bytes, shape.planes * shape.blocks) for shape in gpu.SHAPES
    ]
    assert all(row["verified"] and row["transport"] == "cuda" and row["of_limit"] > 0 for row in rows)


def test_the_bounce_buffers_copies_are_measured_both_ways() -> None:
    rows = list(gpu.bounce_rows(0, 2))
    assert {row["bounce"] for row in rows} == {"to the GPU", "from the GPU"}
    assert all(row["of_limit"] > 0 for row in rows)


def test_a_loop_like_decoding_runs_beside_pulls() -> None:
    alone, beside = gpu_decode.decode_rows((0, 0), "cuda", iters=2)
    assert alone["pulls"] == 0 < beside["pulls"]
    assert alone["p50_us"] > 0 < beside["p50_us"]
