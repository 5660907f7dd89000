# SPDX-License-Identifier: Apache-2.0
"""The README's program runs, its charts are those of the figures, and it is short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


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


def test_the_charts_are_drawn_from_the_figures(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "kvlink",
        "report",
        "--chart",
        str(tmp_path),
        "docs/benchmarks/peers.json",
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    for theme in ("light", "dark"):
        name = f"peers-{theme}.svg"
        committed = (ROOT / "docs" / "_static" / name).read_text()
        assert committed == (tmp_path / name).read_text(), (
            "run the command that docs/benchmarks/compare.md names"
        )


def test_what_is_no_summary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('{"panels": [{"title": "t", "bars": [["a", "b"]]}]}')
    command = [
        sys.executable,
        "-m",
        "kvlink",
        "report",
        "--chart",
        str(tmp_path),
        str(tmp_path / "rows.json"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, "is no summary of measurements" in ran.stderr) == (2, True), ran.stderr


def test_the_charts_figures_are_those_of_the_comparison() -> None:
    page = (ROOT / "docs" / "benchmarks" / "compare.md").read_text()
    data = json.loads((ROOT / "docs" / "benchmarks" / "peers.json").read_text())
    for panel in data["panels"]:
        for _, value, _ in panel["bars"]:
            assert re.search(rf"(?<![\d.]){value:g}(?![\d.])", page), value


def test_it_fits_a_few_screens() -> None:
    assert len(README.splitlines()) <= 120
