# SPDX-License-Identifier: Apache-2.0
"""The picture that a report leads with: bars, headlines, and what is folded away."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from bench.result_rows import EVIL, contest_rows, page_of, peers_row, pull_row, written
from typer.testing import CliRunner

from kvlink.benchmarks.report import headlines
from kvlink.benchmarks.report.command import app
from kvlink.benchmarks.report.measures import results_of
from kvlink.benchmarks.report.tables import time_text


@pytest.mark.parametrize(
    ("ours_us", "others_us", "ending"),
    [
        (100, 400, "0.10 ms over shm, 4.0 times as fast as NIXL"),
        (100, 150, "0.10 ms over shm, 33% less than NIXL"),
        (100, 105, "0.10 ms over shm, no measurable difference from NIXL"),
        (150, 100, "0.15 ms over shm, 50% more than NIXL"),
        (300, 100, "0.30 ms over shm, 3.0 times that of NIXL"),
    ],
)
def test_the_headline_of_a_shape(ours_us: float, others_us: float, ending: str) -> None:
    [contest] = headlines.contests(results_of("x", contest_rows(ours_us, others_us)).measures)
    assert headlines.headline(contest) == f"256 blocks of 16 KiB on one host: kvlink takes {ending}"


def test_shapes_without_another_library_are_told_against_the_limit() -> None:
    measures = results_of("x", [peers_row("kvlink", "tcp", 8, 4096, 1) | {"path": "tcp"}]).measures
    assert headlines.contests(measures) == []
    measures += results_of("x", [peers_row("bare", "socket", 6, 4096, 1) | {"path": "tcp"}]).measures
    [contest] = headlines.contests(measures)
    assert (
        headlines.headline(contest)
        == "One block of 4 KiB over TCP: kvlink takes 8.0 µs, 75% of the limit's speed"
    )


def test_bars_begin_at_zero_and_have_the_fastest_mode_of_each_library() -> None:
    [contest] = headlines.contests(results_of("x", contest_rows(100, 400)).measures)
    drawn = headlines.chart(contest)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert widths == pytest.approx([100 / 9, 100, 400 / 9, 80 / 9, 70], abs=0.1)
    assert re.findall(r"<small>([^<]*)</small>", drawn) == [
        "shm", "80% of limit", "cma", "70% of limit", "fast", "memcpy", "process_vm_readv",
    ]  # fmt: skip


def test_pulls_are_drawn_beside_their_limit() -> None:
    [(reported, drawn)] = headlines.pulls(results_of("x", [pull_row()]).measures)
    assert reported == "cma: up to 6.2 GiB/s, 97% of the limit's speed"
    assert "width:96.9%" in drawn
    assert "left:100.0%" in drawn


def test_the_page_leads_with_bars_and_folds_goals_away(tmp_path: Path) -> None:
    unreachable = {"kind": "bar", "bar": "times as fast", "needs": "≥ 4.0", "got": 2.0, "holds": False}
    bars = [
        unreachable | {"reachable": False},
        unreachable | {"reachable": True},
        unreachable | {"reachable": None},
    ]
    text = page_of(tmp_path, [*contest_rows(100, 400), *bars])
    body = text.partition("<main>")[2]
    assert body.index("4.0 times as fast as NIXL") < body.index("<table") < body.index("<details>")
    details = "".join(re.findall("<details>.*?</details>", body, re.DOTALL))
    assert "Goals" not in re.sub("<details>.*?</details>", "", body, flags=re.DOTALL)
    assert (details.count('class="no"'), details.count('class="at-limit">limit')) == (2, 1)
    assert "0 of 3 are met. 1 are beyond what bare calls" in details


def test_the_page_tells_the_run_and_takes_a_title(tmp_path: Path) -> None:
    machine = {
        "kind": "machine",
        "host": EVIL,
        "at": "2026-11-21T16:20:31+00:00",
        "commit": "abc1234",
        "cores": 2,
    }
    text = page_of(tmp_path, [machine, *contest_rows(1, 2)])
    assert EVIL not in text
    shown = html.escape(EVIL)
    assert f"<title>kvlink measured on {shown}</title>" in text
    assert f'<p class="soft">{shown} · 2 cores · 2026-11-21 16:20:31 UTC · commit abc1234</p>' in text
    text = page_of(tmp_path, [machine, *contest_rows(1, 2)], "--title", f"Nightly {EVIL}")
    assert EVIL not in text
    assert f"<h1>Nightly {shown}</h1>" in text


def test_the_command_says_as_json_what_it_wrote(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'kvlink[report]'")
    page = tmp_path / "report.html"
    given_file = written(tmp_path, "run", contest_rows(1, 2))
    done = CliRunner().invoke(app, [str(given_file), "-o", str(page), "--json"])
    assert json.loads(done.output) == {"report": str(page), "measurements": 6}


@pytest.mark.parametrize(
    ("us", "beside_us", "text"),
    [
        (0.5, 0, "0.50 µs"),
        (72, 0, "72.0 µs"),
        (72, 300, "0.072 ms"),
        (150, 0, "0.15 ms"),
        (123_456, 0, "0.12 s"),
    ],
)
def test_times_read_well(us: float, beside_us: float, text: str) -> None:
    assert time_text(us, beside_us) == text
