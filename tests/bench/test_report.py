# SPDX-License-Identifier: Apache-2.0
"""The page: what it takes from results files, what it leads with, and that it needs nothing from elsewhere."""

from __future__ import annotations

import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from bench.result_rows import (
    EVIL,
    contest_rows,
    migrate_row,
    page_of,
    peers_row,
    pull_row,
    rows,
    simulation_row,
    written,
)
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlink.benchmarks.harness.results import KINDS, runs_of
from kvlink.benchmarks.report import page
from kvlink.benchmarks.report.command import app
from kvlink.benchmarks.report.html import size_text, time_text
from kvlink.errors import ConfigError


def of(*given_rows: dict[str, Any]) -> page.Results:
    return page.results_of("x", runs_of(given_rows))


def test_the_page_has_every_kind_and_needs_no_network(tmp_path: Path) -> None:
    files = [written(tmp_path, "before", rows()), written(tmp_path, "after", rows(2.0))]
    done = CliRunner().invoke(app, [*map(str, files), "-o", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.html").read_text()
    assert EVIL not in text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert "url(http" not in text
    assert "prefers-color-scheme: dark" in text
    for shown in (
        "before: other processes took 12.5% of all CPU time", "Not measured", "after against before", "not enough runs",
        "process_vm_readv", "Where the time of a handoff goes", "max 1.2 ms", "How costs grow", "at most 1.25",
        "Simulated fleets", "The coordinator", "kvlink bench compare",
    ):  # fmt: skip
        assert shown in text, shown


def test_noise_and_other_machines_are_said_before_any_figure(tmp_path: Path) -> None:
    machines = [
        {"kind": "machine", "run": name, "host": name, "cores": 2 + at} for at, name in enumerate("ab")
    ]
    found = [
        machines[0],
        pull_row(run="a"),
        {"kind": "noise", "run": "a", "of": "bench pull", "other_load": 0.68},
    ]
    text = page_of(tmp_path, [*found, machines[1], pull_row(run="b")])
    header = text.partition("<main>")[0]
    assert "68.0% of all CPU time" in header
    assert "different machines (host: a, b)" in header
    assert "different machines (cores: 2, 3)" in header


def test_several_runs_of_one_row_are_one_measurement_of_the_median_run() -> None:
    found = of(*(pull_row(us, run=str(us)) for us in (9.0, 1.0, 5.0)), pull_row(7.0, run="8", order="runs:8"))
    assert [(row["p50_us"], row.get("runs")) for row in found.rows["pull"]] == [(5.0, 3), (7.0, 1)]


@pytest.mark.parametrize(
    ("ours_us", "others_us", "ending"),
    [
        (100, 400, "0.10 ms over shm (p99 0.20 ms), 4.0 times as fast as NIXL"),
        (100, 150, "0.10 ms over shm (p99 0.20 ms), 33% less than NIXL"),
        (100, 105, "0.10 ms over shm (p99 0.20 ms), no measurable difference from NIXL in this run"),
        (150, 100, "0.15 ms over shm (p99 0.30 ms), 50% more than NIXL"),
        (300, 100, "0.30 ms over shm (p99 0.60 ms), 3.0 times that of NIXL"),
    ],
)
def test_the_headline_of_a_shape_has_the_tail(ours_us: float, others_us: float, ending: str) -> None:
    [contest] = page.contests(contest_rows(ours_us, others_us))
    assert page.headline(contest) == f"256 blocks of 16 KiB on one host: kvlink takes {ending}"


def test_shapes_without_another_library_are_told_against_the_limit() -> None:
    ours = peers_row("kvlink", "tcp", 8, 4096, 1) | {"path": "tcp", "p99_us": None}
    assert page.contests([ours]) == []
    for limit_us, said in (
        (6, "75% of the limit's speed"),
        (9, "faster than bare calls, which are no limit here"),
    ):
        [contest] = page.contests([ours, peers_row("bare", "socket", limit_us, 4096, 1) | {"path": "tcp"}])
        assert page.headline(contest) == f"One block of 4 KiB over TCP: kvlink takes 8.0 µs, {said}"


def test_bars_begin_at_zero_and_have_the_fastest_mode_of_each_library() -> None:
    [contest] = page.contests(contest_rows(100, 400))
    drawn = page.chart(contest)
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", drawn)]
    assert widths == pytest.approx([100 / 9, 100, 400 / 9, 80 / 9, 70], abs=0.1)
    assert re.findall(r"<small>([^<]*)</small>", drawn) == [
        "shm", "80% of limit", "cma", "70% of limit", "fast", "memcpy", "process_vm_readv, 2 threads",
    ]  # fmt: skip


def test_no_bar_crosses_its_limit() -> None:
    """One that would says that the limit is none, and has no line."""
    [(reported, drawn)] = page.pulls([pull_row()])
    assert reported == "cma: up to 6.2 GiB/s, 97% of the limit's speed, p99 up to 2.0 times the median"
    assert "width:96.88%" in drawn
    assert "left:100.0%" in drawn
    [(reported, drawn)] = page.pulls([pull_row(of_limit=1.3, limit_gib_per_s=4.8)])
    assert reported == "cma: up to 6.2 GiB/s, p99 up to 2.0 times the median"
    assert "faster than bare calls" in drawn
    assert 'class="mark"' not in drawn


def test_a_handoff_is_a_bar_of_its_parts_with_figures(tmp_path: Path) -> None:
    text = page_of(tmp_path, [migrate_row(), migrate_row(tp="2:4", unstable=True, p99_us=2000.0)])
    [section] = re.findall(r"Where the time of a handoff goes</h2>(.*?)</section>", text, re.DOTALL)
    assert [float(width) for width in re.findall(r"width:([\d.]+)%", section)[1:4]] == pytest.approx(
        [100 / 9, 300 / 9, 0], abs=0.1
    )
    for shown in ("0.90 ms", "max 1.2 ms", "TP 2:4", "p99 2.0 ms, unstable", "claim", "wire"):
        assert shown in section


def test_the_page_tells_the_run_and_takes_a_title(tmp_path: Path) -> None:
    machine = {
        "kind": "machine",
        "host": EVIL,
        "at": "2026-11-21T16:20:31+00:00",
        "commit": "abc1234",
        "cores": 2,
    }
    text = page_of(tmp_path, [machine, *contest_rows(1, 2)])
    shown = html.escape(EVIL)
    assert EVIL not in text
    assert f"<title>kvlink measured on {shown}</title>" in text
    assert f"{shown} · 2026-11-21 16:20:31 UTC · 2 cores · commit abc1234</p>" in text
    text = page_of(tmp_path, [machine, *contest_rows(1, 2)], "--title", f"Nightly {EVIL}")
    assert EVIL not in text
    assert f"<h1>Nightly {shown}</h1>" in text


def test_the_command_says_as_json_what_it_wrote_and_prints_csv(tmp_path: Path) -> None:
    path, given_file = tmp_path / "report.html", written(tmp_path, "run", contest_rows(1, 2))
    done = CliRunner().invoke(app, [str(given_file), "-o", str(path), "--json"])
    assert json.loads(done.output) == {"report": str(path), "measurements": 6}
    listed = list(csv.DictReader(CliRunner().invoke(app, [str(given_file), "--csv"]).output.splitlines()))
    assert [row["p50_us"] for row in listed] == ["1", "9", "2", "6", "0.8", "6.3"]


@pytest.mark.parametrize(
    "row",
    [
        peers_row("kvlink", "b", 1) | {"p50_us": "fast"}, {"kind": "noise", "of": "bench pull", "other_load": "much"},
        peers_row("kvlink", "b", 1) | {"blocks": -1}, pull_row() | {"p99_us": "late"}, pull_row() | {"transport": []},
        pull_row() | {"gib_per_s": float("nan")}, migrate_row(tokens=None), migrate_row(claim_us="slow"),
    ],
)  # fmt: skip
def test_malformed_rows_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a row of the results"):
        page.write([of(peers_row("bare", "memcpy", 1), row)])


FIELDS = sorted(
    {*peers_row("", "", 1), *pull_row(), *migrate_row(), *simulation_row(1), "number", "value", "exponent"}
)
VALUES = st.none() | st.text() | st.floats() | st.booleans() | st.lists(st.integers())


@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_row_is_taken_or_refused(kind: str, row: dict[str, Any]) -> None:
    known = (peers_row("kvlink", "shm", 1), pull_row(), migrate_row(), simulation_row(2))
    for each in (row, *({**one, **row} for one in known)):
        try:
            page.write([of({**each, "kind": kind})])
        except ConfigError:
            continue


def test_files_without_results_and_of_another_schema_are_refused(tmp_path: Path) -> None:
    for given_rows in ([{"kind": "machine"}], [{"kind": "machine", "schema": 99}, pull_row()]):
        done = CliRunner().invoke(app, [str(written(tmp_path, "empty", given_rows))])
        assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize(
    ("size", "text"), [(4096, "4 KiB"), (3 << 20, "3 MiB"), (1000, "1,000 B"), (1536, "1,536 B")]
)
def test_sizes_read_well(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("us", "beside_us", "text"),
    [
        (0.5, 0, "0.50 µs"), (72, 0, "72.0 µs"), (72, 300, "0.072 ms"), (150, 0, "0.15 ms"), (123_456, 0, "0.12 s"),
    ],
)  # fmt: skip
def test_times_read_well(us: float, beside_us: float, text: str) -> None:
    assert time_text(us, beside_us) == text
