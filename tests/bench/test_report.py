# SPDX-License-Identifier: Apache-2.0
"""The page: what it takes from results files, and that it needs nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from bench.result_rows import EVIL, peers_row, pull_row, rows, simulation_row, validation_row, written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvlink.benchmarks.report.command import app
from kvlink.benchmarks.report.comparison import compare
from kvlink.benchmarks.report.measures import Key, Measure, Results, results_of, size_text
from kvlink.errors import ConfigError

FIELDS = [
    *peers_row("", "", 1),
    "transport",
    "limit",
    "limit_gib_per_s",
    "phase",
    "arrivals",
    "workers",
    "readers",
]


def test_other_orders_of_blocks_are_measures_of_their_own() -> None:
    pulls = [pull_row(), pull_row() | {"order": "random"}, pull_row() | {"order": "allocator:16:5"}]
    phase = {"transport": "shm", "model": "m", "tokens": 9, "phase": "wire", "p50_us": 1.0, "order": "runs:8"}
    pair = phase | {"tp": "2:4", "order": "random"}
    found = results_of("results", [*pulls, phase, pair])
    assert {measure.key.way for measure in found.measures} == {
        "kvlink cma", "bare process_vm_readv", "kvlink cma, allocator:16:5", "bare process_vm_readv, allocator:16:5",
    }  # fmt: skip
    assert list(found.phases) == ["shm: m, 9 tokens, runs:8", "shm: m, 9 tokens, TP 2:4"]


@pytest.mark.verify
def test_the_page_has_every_chart_and_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'kvlink[report]'")
    page = tmp_path / "report.html"
    files = [written(tmp_path, "before", [*rows(), pull_row()]), written(tmp_path, "after", rows(2.0))]
    done = CliRunner().invoke(app, [*map(str, files), "-o", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    # speeds, distributions (three sizes, and one block), CPU time, phases, prediction of each; CPU time of the pull
    assert len(drawings) == 2 * 8 + 1
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert EVIL not in text
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert "url(http" not in text
    assert "$" not in text  # formulas that nothing draws
    assert not re.search("(?:fill|stroke|color): #", "".join(drawings)), "the page decides on light and dark"
    assert "prefers-color-scheme: dark" in text
    for shown in (
        "1 of 1 are met",
        "12.5%",
        "Not measured",
        "after against before",
        ">slower<",
        "process_vm_readv",
        "no difference",
    ):
        assert shown in text


def test_simulated_fleets_have_a_curve_for_each_scene(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'kvlink[report]'")
    page = tmp_path / "report.html"
    given_rows = [simulation_row(2), simulation_row(4), simulation_row(8, p50_us=None, p99_us=None)]
    given_rows += [simulation_row(2, popular=0.3, fails_after=0.5), validation_row()]
    done = CliRunner().invoke(app, [str(written(tmp_path, "fleets", given_rows)), "-o", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    [drawing] = re.findall(r"<svg.*?</svg>", text, re.DOTALL)  # one fleet alone is no curve
    ElementTree.fromstring(drawing)
    assert EVIL not in text
    assert "m over gpudirect, load 0.5, leases of 30.0 s" in text
    assert "0.3 of the requests at one worker besides its own, a rail lost after 0.5 of the run" in text
    assert "The simulation beside real pulls" in text


def test_costs_that_grow_have_a_chart_for_each_number(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'kvlink[report]'")
    page = tmp_path / "report.html"
    given_rows: list[dict[str, object]] = [
        {"kind": "growth", "of": of, "cost": EVIL, "number": number, "value": value}
        for of in ("peers", "leases out")
        for number, value in ((1, 2.0), (8, 0.0), (64, 9.0))
    ]
    exponent = {"exponent": 0.36, "from": 1, "to": 64, "needs": "at most 1.05", "holds": True}
    given_rows.append({"kind": "growth", "of": "peers", "cost": EVIL, **exponent})
    done = CliRunner().invoke(app, [str(written(tmp_path, "growth", given_rows)), "-o", str(page)])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert EVIL not in text
    assert "at most 1.05" in text


def test_rows_become_measures() -> None:
    found = results_of("x", [*rows(), pull_row(), {"case": "nhd", "ns_per_descriptor": 2}])
    assert len(found.measures) == 12
    assert [str(measure.key) for measure in found.measures[-2:]] == [
        "kvlink cma, 4,096 × 16 KiB (pull cma)",
        "bare process_vm_readv, 4,096 × 16 KiB (pull cma)",
    ]
    assert found.measures[-1].p50_us == pytest.approx(64 / 1024 / 6.4 * 1e6)
    assert found.phases == {
        "shm: qwen3-8b, 4,096 tokens": {
            "offer": 10, "claim": 11, "plan": 12, "post": 13, "wire": 14, "validate": 15, "settle": 16, "whole": 17
        }
    }  # fmt: skip


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (9, 10, "faster"),
        (90, 110, "slower"),
        (20, 31, "no difference shown"),
        (None, None, "unknown certainty"),
    ],
)
def test_medians_differ_when_their_intervals_do(low: float | None, high: float | None, verdict: str) -> None:
    key = Key("host", 4096, 256, "kvlink shm")
    before, after = Results("before"), Results("after")
    before.measures = [Measure(key, 35, 1, low_us=30, high_us=40)]
    after.measures = [
        Measure(key, (low + high) / 2 if low and high else 35, 1, low_us=low, high_us=high),
        Measure(key._replace(blocks=1), 1, 1),
    ]
    [change] = compare(before, after)
    assert change.verdict == verdict


@pytest.mark.parametrize(
    "row",
    [
        peers_row("a", "b", 1) | {"p50_us": "fast"}, peers_row("a", "b", 1) | {"quantiles_us": ["1"]},
        {"kind": "noise", "of": "bench pull", "other_load": "much"},
        simulation_row(2) | {"workers": "many"}, simulation_row(2, p50_us="fast"), validation_row() | {"readers": None},
        peers_row("a", "b", 1) | {"blocks": -1}, pull_row() | {"p99_us": None},
        pull_row() | {"gib_per_s": float("nan")},
    ],
)  # fmt: skip
def test_malformed_rows_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a row of the results"):
        results_of("x", [row])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS), st.none() | st.text() | st.floats()))
def test_any_row_is_taken_or_refused(row: dict[str, Any]) -> None:
    for known in (
        row,
        {**peers_row("a", "b", 1), **row},
        {**pull_row(), **row},
        {**simulation_row(2), **row},
        {**validation_row(), **row},
    ):
        try:
            results_of("x", [known])
        except ConfigError:
            continue


def test_files_without_results_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'kvlink[report]'")
    done = CliRunner().invoke(app, [str(written(tmp_path, "empty", [{"kind": "machine"}]))])
    assert isinstance(done.exception, ConfigError)


@pytest.mark.parametrize(
    ("size", "text"), [(4096, "4 KiB"), (3 << 20, "3 MiB"), (1000, "1,000 B"), (1536, "1,536 B")]
)
def test_sizes_read_well(size: int, text: str) -> None:
    assert size_text(size) == text
