# SPDX-License-Identifier: Apache-2.0
"""The suite over all transports with pools on a real GPU, between processes, over the transport `cuda`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).parents[1] / "transports"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("staging", "which", "least"),
    [
        ("never", "cuda and not coordinator and not replica", 75),  # what no transport changes
        ("always", "cuda and (pull_bytes or tensor_parallel or streaming or stale_race or late_bytes)", 25),
    ],
    ids=["never", "always"],
)
def test_it_passes_between_gpus(staging: str, which: str, least: int) -> None:
    env = {**os.environ, "KVLINK_TEST_MEMORY": "own gpu", "KVLINK_STAGING": staging, "REQUIRE_LANES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(SUITE)]
    command += ["-m", "not slow", "-k", which]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= least
