# SPDX-License-Identifier: Apache-2.0
"""Which lanes a change touches, and how a lane's output is counted."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def lanes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lanes", ROOT / ".ci" / "lanes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("csrc/transports/verbs/queue_pair.cc", ["transports", "sanitizers", "rdma"]),
        ("csrc/engine/lane.cc", ["transports", "instructions", "sanitizers", "soak"]),
        ("csrc/device/cuda_copier.cc", ["transports", "sanitizers", "gpu"]),
        ("kvlink/coordinator/store/etcd/sync.py", ["processes", "simulate", "deploy", "docs"]),
        ("kvlink/worker/worker.py", ["transports", "processes", "docs"]),
        ("kvlink/monitoring/status_page/page.js", ["processes", "pages", "docs"]),
        ("integrations/vllm/loads.py", ["processes", "docs", "engines"]),
        ("docs/operate/coordinator.md", ["docs"]),
        ("docs/operate/monitoring.md", ["docs", "newcomer"]),
        ("docs/examples/streaming.py", ["processes", "docs", "newcomer"]),
        ("integrations/deploy/chart/values.yaml", ["deploy"]),
        ("tests/netns/test_two_hosts.py", ["netns"]),
        ("tests/transfer/test_pool.py", []),
        ("README.md", ["newcomer"]),
    ],
)
def test_a_path_touches_its_lanes(lanes: ModuleType, path: str, names: list[str]) -> None:
    assert lanes.touched([path]) == names


def test_every_file_has_a_row(lanes: ModuleType) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a checkout: git ls-files says " + listed.stderr.strip())
    lanes.touched(listed.stdout.splitlines())


def test_a_path_without_a_row_is_named(lanes: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"elsewhere/file\.c: no row of TOUCHED"):
        lanes.touched(["elsewhere/file.c"])


def test_counts_come_from_closing_lines_alone(lanes: ModuleType) -> None:
    output = """
    test_that_2 failed before
    [==========] Running 471 tests from 40 test suites.
    [  PASSED  ] 471 tests.
    === 2 failed, 120 passed, 3 skipped, 1 error in 12.34s ===
    119 passed, 4 skipped in 0.51s
    """
    shown = "\n".join(line.strip() for line in output.splitlines())
    assert lanes.counts(shown) == {"passed": 710, "failed": 3, "skipped": 7}
