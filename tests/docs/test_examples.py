# SPDX-License-Identifier: Apache-2.0
"""The examples run as they are, and say what their pages say they do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"

# What each prints. Those outside the gate have a time limit, load torch, or start a coordinator.
OUTPUT = {
    "streaming.py": "all 6 blocks are right: 196608 bytes",
    "asyncio_server.py": "computing it here: request request-2",
    "broadcast.py": "4 workers have prefix, and its offer is settled",
    "torch_cache.py": "all rows are equal, converted from NHD to HND on the way",
    "two_processes.py": "request-42 settled: its blocks may be written again",
    "with_coordinator.py": "pulled 98304 bytes by request id",
}
RUN_BY_COMPOSE = "traffic.py"  # runs until it is stopped; tests/deploy/test_compose.py runs it
_IN_GATE = ("streaming.py", "two_processes.py")


def test_each_example_is_known() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == OUTPUT.keys() | {RUN_BY_COMPOSE}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _IN_GATE else [pytest.mark.verify]) for name in OUTPUT]
)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name)], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert OUTPUT[name] in ran.stdout
    assert ran.stderr == ""


def test_an_example_shows_what_its_row_promises() -> None:
    page = (EXAMPLES.parent / "getting-started" / "own-server.md").read_text()
    for row in (line for line in page.splitlines() if line.startswith("| [") and ".py]" in line):
        name, promised = row.split("](")[0][3:], row.split("|")[2]
        for code in promised.split("`")[1::2]:
            if not code.startswith("kvlink "):  # a command to run beside it
                assert code in (EXAMPLES / name).read_text(), (name, code)


def test_an_error_of_the_parent_ends_both_processes(tmp_path: Path) -> None:
    """A reader who changes a number wrongly gets the error, and not a program that waits for its child for ever."""
    program = (EXAMPLES / "two_processes.py").read_text()
    changed = tmp_path / "changed.py"
    changed.write_text(program.replace("num_tokens=48", "num_tokens=480"))
    ran = subprocess.run([sys.executable, str(changed)], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, "480 tokens do not fit" in ran.stderr) == (1, True), ran.stderr
