# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench compare`: the run is the unit, so that what differs from run to run is no difference of versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.result_rows import pull_row, written
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.harness.results import runs_of
from kvlink.benchmarks.harness.statistics import compare_runs
from kvlink.benchmarks.report.comparison import compare, measured, side_of
from kvlink.errors import ConfigError
from kvlink.transfer.engine import host_transports

ROWS, PAIRS, RUNS = 6, 10, 5
SPREADS = (0.04, 0.1, 0.2, 0.3)
"""From run to run, of one commit on a quiet machine and on a busy one: standard deviations of logarithms."""


def drawn(rng: np.random.Generator, spread: float, ratio: float = 1.0) -> list[float]:
    return (1000 * ratio * np.exp(spread * rng.standard_normal(RUNS))).tolist()


def verdicts(spread: float, seed: int, ratio: float = 1.0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [compare_runs(drawn(rng, spread), drawn(rng, spread, ratio)).verdict for _ in range(ROWS * PAIRS)]


@pytest.mark.parametrize("spread", SPREADS)
def test_two_sides_of_one_version_are_told_apart_in_at_most_one_pair_of_twenty(spread: float) -> None:
    for seed in range(5):
        found = [verdict for verdict in verdicts(spread, seed) if verdict != "no difference shown"]
        assert len(found) <= 0.05 * ROWS * PAIRS, (seed, found)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.4, "slower"), (1 / 1.4, "faster")])
def test_a_real_change_is_found(ratio: float, verdict: str) -> None:
    found = verdicts(0.06, 0, ratio)
    assert found.count(verdict) >= 0.95 * len(found)
    assert set(found) <= {verdict, "no difference shown"}


def test_a_change_too_small_to_count_is_none() -> None:
    before, after = [100.0, 100.1, 100.2, 100.3, 100.4], [102.0, 102.1, 102.2, 102.3, 102.4]
    assert compare_runs(before, after).verdict == "no difference shown"
    assert compare_runs(before, after, least=0.01).verdict == "slower"


@pytest.mark.parametrize("runs", [1, 2, 3, 4])
def test_a_few_runs_allow_no_verdict(runs: int) -> None:
    assert compare_runs([1.0] * runs, [9.0] * runs).verdict == "not enough runs"


def test_many_runs_are_compared_by_some_of_the_splits() -> None:
    rng = np.random.default_rng(1)
    before, after = (np.exp(0.1 * rng.standard_normal(40)) for _ in range(2))
    assert compare_runs(before.tolist(), (1.3 * after).tolist()).verdict == "slower"
    assert compare_runs(before.tolist(), after.tolist()).verdict == "no difference shown"


def side(costs: list[float], shares: list[float]) -> dict[str, list[Any]]:
    pairs = enumerate(zip(costs, shares, strict=True))
    return runs_of(pull_row(us, of_limit=share, run=str(number)) for number, (us, share) in pairs)  # type: ignore[return-value]


def test_the_share_is_compared_where_it_repeats_better_than_the_time() -> None:
    """The machine was a third slower during the second half of the runs, and so were the bare calls."""
    drift, slow = [1000.0, 1010, 1300, 1310, 1320], [1000.0, 1320, 1310, 1010, 1300]
    [same] = compare(side(drift, [0.8, 0.81, 0.8, 0.79, 0.8]), side(slow, [0.8, 0.79, 0.81, 0.8, 0.8]))
    assert (same.by, same.found.verdict) == ("share", "no difference shown")
    [worse] = compare(side(drift, [0.8, 0.81, 0.8, 0.79, 0.8]), side(slow, [0.6, 0.61, 0.6, 0.59, 0.6]))
    assert (worse.by, worse.found.verdict) == ("share", "slower")
    assert worse.found.ratio == pytest.approx(0.8 / 0.6, rel=0.01)
    [time] = compare(
        side([1000.0] * 5, [0.8, 0.5, 0.9, 0.6, 0.8]), side([1500.0] * 5, [0.8, 0.5, 0.9, 0.6, 0.8])
    )
    assert (time.by, time.found.verdict) == ("time", "slower")


def results(folder: Path, name: str, us: list[float]) -> str:
    found = [pull_row(each, run=str(number), of_limit=None) for number, each in enumerate(us)]
    return str(written(folder, name, found))


@pytest.mark.parametrize(
    ("after", "code"),
    [([100.0, 101, 99, 102, 98], 0), ([200.0, 201, 199, 202, 198], 1), ([50.0, 51, 49, 52, 48], 0)],
)
def test_the_exit_status_says_whether_something_is_slower(
    tmp_path: Path, after: list[float], code: int
) -> None:
    before = results(tmp_path, "a.jsonl", [100.0, 102, 98, 101, 99])
    done = CliRunner().invoke(app, ["compare", before, results(tmp_path, "b.jsonl", after), "--json"])
    assert done.exit_code == code, done.output
    [row] = map(json.loads, done.output.splitlines())
    assert row["runs"] == "5 and 5"


def test_runs_of_other_machines_are_said(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        machine = {"kind": "machine", "run": "0", "host": name, "cores": 2}
        pulls = [pull_row(100.0 + number, run=str(number), of_limit=None) for number in range(5)]
        paths.append(str(written(tmp_path, f"{name}.jsonl", [machine, *pulls])))
    done = CliRunner().invoke(app, ["compare", *paths])
    assert "different machines (host: a, b)" in done.output


def test_one_file_a_side_is_too_few_and_what_is_no_side_is_refused(tmp_path: Path) -> None:
    one = results(tmp_path, "a.jsonl", [100.0])
    for sides in ([one, one], [one, str(tmp_path / "nothing")], [str(tmp_path / "x"), str(tmp_path / "y")]):
        assert isinstance(CliRunner().invoke(app, ["compare", *sides]).exception, ConfigError)
    with pytest.raises(ConfigError, match="neither a results file, nor a checkout"):
        measured([tmp_path, tmp_path], 1, ["pull"])


def environment(folder: Path, name: str, us: float) -> Path:
    """Makes an environment whose Python prints one row, and keeps the order of all calls."""
    python = folder / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    row = json.dumps(pull_row(us, run="%s"))
    python.write_text(
        f"#!{sys.executable}\nimport os\nwith open({str(folder / 'calls')!r}, 'a') as calls:\n"
        f"    calls.write({name!r})\nprint({row!r} % os.getpid())\n"
    )
    python.chmod(0o755)
    return folder / name


def test_the_sides_take_turns_in_new_processes(tmp_path: Path) -> None:
    sides = [environment(tmp_path, "a", 100.0), environment(tmp_path, "b", 200.0)]
    before, after = measured(sides, 3, ["pull"])
    assert (tmp_path / "calls").read_text() == "abbaab"
    assert [len(runs) for runs in (before, after)] == [3, 3]
    [change] = compare(before, after)
    assert change.found.verdict == "not enough runs"


@pytest.mark.verify
@pytest.mark.timeout(900)  # twelve processes, one after the other: 7 minutes on a machine with a load of 7
@pytest.mark.skipif(bool(host_transports().get("shm", "")), reason="shm does not run here")
def test_pulls_of_one_version_are_told_apart_in_at_most_one_pair_of_twenty(tmp_path: Path) -> None:
    """Twelve runs in new processes, of which each comparison takes ten: six rows in ten comparisons."""
    checkout = Path(__file__).resolve().parents[2]
    shapes = [part for size in (8, 16, 32, 64, 128, 256) for part in ("--block-bytes", str(size << 10))]
    options = ["pull", "--transport", "shm", *shapes, "--blocks", "16", "--iters", "64"]
    every = [*measured([checkout], 12, options)[0].values()]
    found = []
    for number in range(PAIRS):
        chosen = np.random.default_rng(number).permutation(len(every))[: 2 * RUNS]
        halves = [{str(at): every[at] for at in half} for half in (sorted(chosen)[::2], sorted(chosen)[1::2])]
        found += [change.found.verdict for change in compare(halves[0], halves[1])]
    assert len(found) == ROWS * PAIRS
    told = [verdict for verdict in found if verdict != "no difference shown"]
    assert len(told) <= 0.05 * len(found), told
    assert side_of(written(tmp_path, "a.jsonl", [pull_row()])) != {}
