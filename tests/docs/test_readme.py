# SPDX-License-Identifier: Apache-2.0
"""The README's program runs, its charts are those of the figures, and it is short."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = sorted((ROOT / "docs" / "benchmarks" / "figures").glob("*.json"))
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


def test_no_bar_passes_the_line_of_its_limit() -> None:
    """A pull that is faster than its limit shows that the limit was none."""
    panels = [
        panel for path in FIGURES for panel in json.loads(path.read_text())["panels"] if panel.get("mark")
    ]
    assert panels
    for panel in panels:
        assert max(value for _, value, _ in panel["bars"]) <= 1.05 * panel["mark"], panel["title"]


def test_the_charts_are_drawn_from_the_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlink", "report", "--chart", str(tmp_path), *map(str, FIGURES)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    drawn = ROOT / "docs" / "benchmarks" / "figures"
    old = [
        figure.stem
        for figure in FIGURES
        if (drawn / f"{figure.stem}.svg").read_text() != (tmp_path / f"{figure.stem}.svg").read_text()
    ]
    assert not old, "run kvlink report --chart docs/benchmarks/figures docs/benchmarks/figures/*.json"


def test_the_picture_shows_what_servers_use_and_no_limit_that_is_slower() -> None:
    panels = json.loads((ROOT / "docs/benchmarks/figures/peers.json").read_text())["panels"]
    first = {name for name, *_ in panels[0]["bars"]}
    assert ("memory of an engine" in panels[0]["title"], first >= {"kvlink (cma)", "NIXL", "UCX"}) == (
        True,
        True,
    )
    for panel in panels:
        times = {
            kind: [value for _, value, each in panel["bars"] if each == kind] for kind in ("ours", "limit")
        }
        assert all(limit < own for limit in times["limit"] for own in times["ours"])


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


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.stem)
def test_each_number_of_a_chart_is_on_its_page(figure: Path) -> None:
    """So that nobody changes one of the two alone."""
    data = json.loads(figure.read_text())
    page = (ROOT / "docs" / "benchmarks" / data["page"]).read_text()
    assert f"figures/{figure.stem}.svg" in page
    bars = [bar for panel in data["panels"] for bar in panel["bars"]]
    missing = [
        (name, value)
        for name, value, _ in bars
        if not re.search(rf"(?<![\d.]){value:,g}{'' if value % 1 == 0 else '0?'}(?!\d|\.\d)", page)
    ]
    assert missing == []


def test_it_fits_a_few_screens() -> None:
    assert len(README.splitlines()) <= 110
