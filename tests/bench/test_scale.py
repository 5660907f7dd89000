# SPDX-License-Identifier: Apache-2.0
"""The load generator with a handful of workers: all join, beat, receive events and rejoin. Timings gate nothing."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pytest
from control.etcd_cluster import need_etcd

from kvlink.benchmarks import scale
from kvlink.benchmarks.harness.processes import BenchError
from kvlink.benchmarks.harness.statistics import exponent, exponents
from kvlink.benchmarks.measurements.control import Row
from kvlink.benchmarks.scale import load
from kvlink.cli.tables import show_parts, show_rows

pytestmark = pytest.mark.verify

PHASES = [
    *("join", "memory", "tickets", "idle", "handoffs", "streamed handoffs"),
    *("first list", "restart", "fan-out"),
]


def run(workers: Sequence[int], **options: Any) -> list[Row]:
    few = {"tickets": 3, "lease_s": 6.0, "idle_s": 2.5, "changes": 4, "joinings": 1}
    return list(chain.from_iterable(scale.parts(workers, **few, **options)))


def check(rows: list[Row], workers: int, phases: Sequence[str] = PHASES) -> None:
    """Checks the rows of one number of workers, with 3 tickets each."""
    assert [row["what"] for row in rows] == [*phases]
    assert [row for row in rows if (row["verified"], row["workers"]) != (True, workers)] == []
    row = {row["what"]: row for row in rows}
    assert row["join"]["beats"] == workers
    assert row["tickets"]["tickets"] == 3 * workers
    assert row["idle"]["beats"] >= workers  # one every 2 s, and none was refused
    assert row["fan-out"]["events"] == 4


@pytest.mark.timeout(300)  # eight coordinators, one after the other
def test_every_phase_counts_whom_it_simulates() -> None:
    rows = run([4, 8], processes=2)
    check(rows[: len(PHASES)], 4)
    check(rows[len(PHASES) : 2 * len(PHASES)], 8)
    growth = {(row["phase"], row["of"]): row for row in rows[2 * len(PHASES) :]}
    assert (growth["restart", "cpu_s"]["from"], growth["restart", "cpu_s"]["to"]) == (4, 8)


def test_on_etcd() -> None:
    need_etcd()
    rows = run([24], store="etcd")
    check(rows, 24, [*PHASES, "lost replica"])
    assert 0 < rows[-1]["moved"] <= 24  # each had picked one of two by chance


def test_workers_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    joined, loads = scale.fleet, []

    def noted(measured: load.Load, *sizes: Any) -> Iterator[Row]:
        loads.append(measured)
        return joined(measured, *sizes)

    monkeypatch.setattr(scale, "fleet", noted)
    rows, _ = scale.parts([4], tickets=1, lease_s=6.0, idle_s=1.5, joinings=0)
    assert [next(rows)["verified"] for _ in ("memory", "tickets")] == [True, True]
    (crowd,) = multiprocessing.active_children()
    os.kill(crowd.pid or 0, signal.SIGSTOP)
    while loads[0].status().workers:
        time.sleep(0.1)
    os.kill(crowd.pid or 0, signal.SIGCONT)
    assert next(rows)["verified"] is False
    rows.close()


def test_a_load_process_that_dies_is_an_error() -> None:
    rows, _ = scale.parts([4], tickets=1, joinings=0)
    next(rows)
    (crowd,) = multiprocessing.active_children()
    crowd.kill()
    with pytest.raises(BenchError, match="a load process ended"):
        next(rows)


def test_exponents_of_known_curves() -> None:
    sizes = (125, 250, 1000)
    assert exponent({n: 3.0 * n for n in sizes}) == pytest.approx(1)
    assert exponent({n: 0.1 * n**2 for n in sizes}) == pytest.approx(2)
    assert exponent(dict.fromkeys(sizes, 7.0)) == pytest.approx(0)
    with pytest.raises(ValueError, match="two sizes"):
        exponent({125: 1.0})


def test_exponents_of_what_was_measured_twice() -> None:
    costs = {100: [1.0, 2.0], 200: [2.0, 2.0]}
    assert exponents(costs) == pytest.approx((0, math.log2(4 / 3), 1))
    assert exponents({100: [1.0], 200: [2.0]}) == pytest.approx((1, 1, 1))


def test_joins_are_repeated_and_who_beats_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_JOINING_LEASE_S", 1.0)  # a beat every quarter of it
    monkeypatch.setattr(load, "_CALM_S", 1.0)
    rows, _ = scale.parts([4], joinings=2)
    joins = [next(rows) for _ in range(2)]
    rows.close()
    assert [(row["what"], row["verified"], row["beats"] > 4) for row in joins] == [("join", False, True)] * 2


def test_each_phase_has_a_table_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"what": "join", "mib": 1.5}, {"what": "idle", "beats": 7}, {"what": "join", "mib": 2.5}]
    assert show_rows(rows, False, "bench scale", by="what") == rows
    joined, idle = capsys.readouterr().out.split("idle", 1)
    assert ("mib" in joined, "1.5" in joined, "2.5" in joined, "beats" in joined) == (True, True, True, False)
    assert ("beats" in idle, "7" in idle, "mib" in idle) == (True, True, False)


@pytest.mark.parametrize(("parts", "bar"), [(2, True), (1, False)])
def test_progress_on_a_terminal_says_how_much_there_is(
    parts: int, bar: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    rows = [{"what": "join"}, {"what": "idle"}]
    assert show_parts([iter(rows) for _ in range(parts)], True, "bench scale") == rows * parts
    output = capsys.readouterr()
    assert list(map(json.loads, output.out.splitlines())) == rows * parts
    assert (f"{parts}/{parts}" in output.err) == bar
    assert f"bench scale: {2 * parts} rows, idle" in output.err


def test_progress_leaves_no_trace_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    show_parts([[{"what": "join"}], []], True, "bench scale")
    assert capsys.readouterr().err == ""


def kvlink(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvlink", "bench", "scale", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_command_tells_the_machine_first() -> None:
    done = kvlink("--workers", "2", "--tickets", "1", "--lease-s", "3", "--idle-s", "1.2", "--json")
    assert done.returncode == 0, done.stderr
    machine, *rows, noise = map(json.loads, done.stdout.splitlines())
    assert (machine["kind"], noise["kind"]) == ("machine", "noise")
    assert "commit" in machine
    assert [row["what"] for row in rows] == ["join", "join", *PHASES]


@pytest.mark.parametrize("wrong", [("--workers", "0"), ("--workers", "8,"), ("--store", "disk")])
def test_nonsense_is_bad_usage(wrong: tuple[str, str]) -> None:
    assert kvlink(*wrong).returncode == 2
