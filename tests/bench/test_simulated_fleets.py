# SPDX-License-Identifier: Apache-2.0
"""Fleets under a trace of requests: their curves, the command that draws them, and their validation by real pulls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench.simulated_paths import MODEL, PATHS
from typer.testing import CliRunner

from kvlink.benchmarks.harness.results import fails
from kvlink.benchmarks.simulation import validation
from kvlink.benchmarks.simulation.command import app
from kvlink.benchmarks.simulation.engine import Fleet
from kvlink.benchmarks.simulation.fleets import Move, Scene, jobs_of, rows
from kvlink.benchmarks.workloads.traces import Request, synthetic
from kvlink.errors import ConfigError
from kvlink.transfer.cost_model import Cost

MOVE = Move(MODEL, 8, PATHS[0])


REQUESTS = synthetic("mooncake-conversation", 400, 1)


def test_the_same_seed_gives_the_same_rows() -> None:
    scene = Scene(0.7, popular=0.2)
    again = list(rows(MOVE, REQUESTS, [4, 16], scene))
    assert list(rows(MOVE, REQUESTS, [4, 16], scene)) == again
    assert list(rows(MOVE, REQUESTS, [4, 16], replace(scene, seed=1))) != again


def test_jobs_load_the_prefill_workers_as_asked() -> None:
    fleet = Fleet(4, 4, MOVE.rails())
    jobs = jobs_of(REQUESTS, MOVE, fleet, 0.25, 0.5, 0)
    span = jobs[-1].at_s - jobs[0].at_s
    assert sum(job.num_bytes for job in jobs) / span == pytest.approx(0.25 * 4 * 8 * fleet.rails.send)
    assert sum(job.prefill == 0 for job in jobs) / len(jobs) == pytest.approx(0.5 + 0.5 / 4, abs=0.08)
    assert {job.decode for job in jobs} == set(range(4))


@pytest.mark.parametrize("requests", [[], [Request(0, 0, 1)], [Request(0, 5, 1), Request(0, 6, 1)]])
def test_requests_at_one_time_are_no_load(requests: list[Request]) -> None:
    with pytest.raises(ConfigError, match="two different times"):
        jobs_of(requests, MOVE, Fleet(1, 1, MOVE.rails()), 0.5, 0.0, 0)


def test_load_and_popularity_show_in_the_curve() -> None:
    def row(**scene: float) -> dict[str, float]:
        [found] = rows(MOVE, REQUESTS, [32], replace(Scene(0.3, lease_s=0.3), **scene))
        return found

    calm, busy, popular = row(), row(load=0.9), row(popular=0.5)
    assert calm["p50_us"] <= calm["p90_us"] <= calm["p99_us"] <= calm["max_us"]
    assert busy["p99_us"] > calm["p99_us"]
    assert calm["expired"] == 0
    assert calm["wasted_gib"] == pytest.approx(0)
    assert popular["expired"] > 0
    assert popular["wasted_gib"] > 0
    assert popular["busiest"] > calm["busiest"]


def shown(*arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return [
        row for row in map(json.loads, done.output.splitlines()) if row["kind"] not in ("machine", "noise")
    ]


def test_the_command_draws_a_curve(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text(
        "\n".join(
            json.dumps({"timestamp": 100 * number, "input_length": 5000 + number, "output_length": 1})
            for number in range(50)
        )
    )
    found = shown(
        "--workers", "2", "--workers", "8", "--trace", str(trace), "--requests", "40", "--popular", "0.3"
    )
    assert [row["workers"] for row in found] == [2, 8]
    for row in found:
        assert (row["kind"], row["path"], row["requests"], row["rails"]) == ("simulation", "gpudirect", 40, 8)
        assert 0 < row["p50_us"] <= row["max_us"]
        assert row["p99_us"] is None, "forty requests have no 99th percentile"
    table = CliRunner().invoke(app, ["--workers", "2", "--requests", "10"])
    assert table.exit_code == 0
    assert "expired" in table.output


def test_a_measured_cost_makes_the_tcp_fleet(tmp_path: Path) -> None:
    results = tmp_path / "results"
    shapes = [(1, 16_384), (256, 4 << 20), (4096, 64 << 20), (4096, 256 << 20)]

    def calibrated(transport: str, cost: Cost) -> list[str]:
        lines = [
            {
                "transport": transport,
                "blocks": ops,
                "block_bytes": size // ops,
                "p50_us": cost.predict_us(ops, size),
            }
            for ops, size in shapes
        ]
        results.write_text("\n".join(map(json.dumps, lines)))
        return [
            "--path",
            "tcp",
            "--calibrate",
            str(results),
            "--workers",
            "2",
            "--requests",
            "30",
            "--load",
            "0.01",
        ]

    slow, fast = (
        shown(*calibrated("tcp", cost))[0]["p50_us"] for cost in (Cost(50, 100, 1), Cost(12.5, 25, 4))
    )
    assert slow == pytest.approx(4 * fast, rel=0.01)
    assert isinstance(CliRunner().invoke(app, calibrated("shm", Cost(50, 100, 1))).exception, ConfigError)


@pytest.mark.parametrize(
    "arguments",
    [("--path", "nvlink"), ("--trace", "nowhere"), ("--model", "gpt-2"), ("--calibrate", "results")],
)
def test_what_cannot_be_simulated_is_refused(arguments: tuple[str, str]) -> None:
    assert isinstance(CliRunner().invoke(app, arguments).exception, ConfigError)


def test_real_pulls_are_put_beside_their_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "SHAPES", (2, 3, 4))
    found = list(validation.rows("loopback", requests=12, most_readers=2))
    assert [row["readers"] for row in found] == [1, 2]
    for row in found:
        assert row["verified"] in (True, None), "only the last pull of a reader is compared"
        assert 1 <= row["tries"] <= 3
        assert row["p50_error"] == pytest.approx(row["simulated_p50_us"] / row["p50_us"] - 1)
        assert 0 < row["simulated_p50_us"] <= row["simulated_p99_us"]


def test_the_capacity_is_that_of_as_many_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    together, asked = validation._Bench._together, []

    def noted(bench: validation._Bench, readers: int) -> float:
        asked.append(readers)
        return together(bench, readers)

    monkeypatch.setattr(validation, "SHAPES", (2, 3, 4))
    monkeypatch.setattr(validation, "MOST_DRIFT", 1e9)
    monkeypatch.setattr(validation._Bench, "_together", noted)
    list(validation.rows("loopback", requests=4, most_readers=3))
    assert asked == [2, 2, 2, 2, 3, 3], "before and after each row"


def test_wrong_bytes_of_a_validation_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "SHAPES", (2, 3, 4))
    monkeypatch.setenv("KVLINK_FAULT", "corrupt-data@every:1")
    [row] = validation.rows("fault+loopback", requests=4, most_readers=1)
    assert row["verified"] is False


@pytest.mark.parametrize(
    ("mean", "p50", "drift", "holds"),
    [(0.2, -0.3, 0.05, True), (-0.41, 0.1, 0.0, False), (0.1, 0.36, 0.0, False), (0.0, 0.0, -0.43, False)],
)
def test_a_simulation_that_is_wrong_or_a_machine_that_drifts_fails(
    mean: float, p50: float, drift: float, holds: bool
) -> None:
    row = {"kind": "validation", "mean_error": mean, "p50_error": p50, "drift": drift}
    row |= validation.judged(row, 0.35)
    assert (row["holds"], fails(row)) == (holds, not holds)
