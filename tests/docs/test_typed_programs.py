# SPDX-License-Identifier: Apache-2.0
"""mypy accepts, strictly, what users write: the README's program, the examples, and block ids of every kind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
IDS = """
from array import array
import numpy as np
import kvlink

def use(worker: kvlink.Worker, ticket: kvlink.Ticket) -> None:
    worker.offer("r", [1, 2])
    worker.offer("r", (1, 2))
    worker.offer("r", range(3))
    worker.offer("r", array("I", [1]))
    worker.offer("r", [np.int64(1)])
    worker.offer("r", np.arange(3))
    worker.offer("r", np.arange(3, dtype=np.uint8)[::2])
    worker.pull(ticket, into=range(3))
    worker.pull([ticket.to_text()], np.array([1, 2], np.int32)).wait()
    worker.pull(request_id="r", into=[1]).wait(1.0)
    for event in worker.watch_events_blocking(1.0):
        print(event.request_id, event.how.value)
    worker.release(ticket)
    worker.offer("r", "12")  # refused
    worker.offer("r", [1.5])  # refused
    worker.pull(ticket, 7)  # refused
    worker.pull(7, [1])  # refused
"""
TENSORS = """
import torch
import kvlink

def use(worker: kvlink.Worker, ticket: kvlink.Ticket) -> None:
    worker.offer("r", torch.tensor([1, 2]))
    worker.pull(ticket, torch.tensor([1, 2]))
"""


def refused(*paths: Path) -> list[int]:
    """Returns the line of each error."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, paths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    lines = [int(number) for number in re.findall(r"^\S+:(\d+): error", done.stdout, re.MULTILINE)]
    assert done.returncode == bool(lines), done.stdout
    return lines


def test_ids_of_every_kind_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "ids.py"
    source.write_text(IDS)
    assert refused(source) == [
        number for number, line in enumerate(IDS.splitlines(), 1) if line.endswith("# refused")
    ]


def test_the_readme(tmp_path: Path) -> None:
    (program,) = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    source = tmp_path / "readme.py"
    source.write_text(program)
    assert refused(source) == []


@pytest.mark.verify
def test_the_examples_and_tensors(tmp_path: Path) -> None:
    """mypy takes half a minute for torch."""
    pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    source = tmp_path / "tensors.py"
    source.write_text(TENSORS)
    assert refused(source, *sorted(EXAMPLES.glob("*.py"))) == []
