# SPDX-License-Identifier: Apache-2.0
"""The README's program runs, its charts are those of the figures, and it is short."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "docs" / "benchmarks" / "chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_program_runs_as_it_is(tmp_path: Path) -> None:
    (program,) = [text for language, text in BLOCKS if language == "python"]
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    path, ended = ran.stdout.splitlines()
    assert path.startswith("prefill-0 over ")
    assert ended == "request-42 settled"


def test_json_in_command_lines_is_json() -> None:
    for text in re.findall(r"'(\{.*?\})'", README):
        json.loads(text)


def test_the_charts_are_drawn_from_the_figures(chart: ModuleType) -> None:
    for name, text in chart.charts().items():
        assert (ROOT / "docs" / "_static" / name).read_text() == text, "run python docs/benchmarks/chart.py"


def test_the_charts_figures_are_those_of_the_comparison() -> None:
    page = (ROOT / "docs" / "benchmarks" / "compare.md").read_text()
    data = json.loads((ROOT / "docs" / "benchmarks" / "peers.json").read_text())
    for panel in data["panels"]:
        for _, value, _ in panel["bars"]:
            assert re.search(rf"(?<![\d.]){value:g}(?![\d.])", page), value


def test_it_fits_a_few_screens() -> None:
    assert len(README.splitlines()) <= 120
