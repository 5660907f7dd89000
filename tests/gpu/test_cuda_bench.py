# SPDX-License-Identifier: Apache-2.0
"""Benchmarks on a GPU, and compute-sanitizer over the core."""

from __future__ import annotations

import shutil
import subprocess
import sys

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


_ERROR = 99


@pytest.mark.timeout(900)
def test_the_kernel_stays_within_its_memory() -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip(
            "compute-sanitizer is not installed: it comes with the CUDA toolkit (cuda-sanitizer-13-0)"
        )
    options = ["--tool", "memcheck", "--target-processes", "all", "--error-exitcode", str(_ERROR)]
    # Asking the driver for what it may not have is no error: cuMemCreate for a fabric.
    options += ["--report-api-errors", "no"]
    command = [sys.executable, "-m", "kvlink", "bench", "gpu", "--iters", "1", "--json"]
    done = subprocess.run(
        [sanitizer, *options, *command], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
