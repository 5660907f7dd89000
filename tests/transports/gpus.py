# SPDX-License-Identifier: Apache-2.0
"""Has what tests of pools on a GPU share. tests/fake_cuda stands for the GPU and its driver."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transports.pools import OWN_GPU
from transports.processes import PeerProcess, RemoteWorker

ON_HOST = "kvlink"
LEAST = 4 << 20
"""Bytes of the smallest bounce buffer."""
SOURCES = sorted((Path(__file__).parents[1] / "fake_cuda").glob("*.cc"))

Open = Callable[..., tuple[RemoteWorker, RemoteWorker]]
Holdable = Callable[..., tuple[PeerProcess, RemoteWorker, RemoteWorker, Path]]

SUITES_BETWEEN_GPUS = pytest.mark.parametrize(
    ("staging", "which", "least"),
    [
        ("never", "cuda and not coordinator and not replica", 75),  # what no transport changes
        ("always", "cuda and (pull_bytes or tensor_parallel or streaming or stale_race or late_bytes)", 25),
    ],
    ids=["never", "always"],
)
"""How pieces are copied, which tests of this folder to run so, and how many must pass."""


def run_suite(staging: str, which: str, least: int, timeout_s: float, **env: str) -> None:
    """In a process of its own, with pools on GPUs. Leaves slow tests out, as those that call this are."""
    env = {**os.environ, "KVLINK_TEST_MEMORY": OWN_GPU, "KVLINK_STAGING": staging, "REQUIRE_LANES": "", **env}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    command += ["-m", "not slow", "-k", which]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= least
