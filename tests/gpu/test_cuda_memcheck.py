# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's memory checker over the kernel: whole benchmark rows under compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

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
