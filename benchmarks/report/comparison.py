# SPDX-License-Identifier: Apache-2.0
"""Compares two sides, each of several runs, and makes the runs of `kvlink bench compare`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from kvlink.errors import ConfigError

from ..harness.results import KINDS, Row, key_of, key_text, number, perhaps, read_rows, runs_of
from ..harness.statistics import LEAST_EFFECT, Comparison, compare_runs, spread

_RUN_S = 1800.0


class Change(NamedTuple):
    """Compares the runs of both sides of one row. `by` is "time", or "share" of the limit of the same run."""

    key: tuple[Any, ...]
    by: str
    runs: tuple[int, int]
    found: Comparison

    def row(self) -> dict[str, Any]:
        """Returns the row that is printed. `ratio` is the time after / the time before."""
        return {
            "what": key_text(self.key),
            "before": self.found.before,
            "after": self.found.after,
            "ratio": self.found.ratio,
            "verdict": self.found.verdict,
            "by": self.by,
            "runs": f"{self.runs[0]} and {self.runs[1]}",
            "chance": self.found.chance,
        }


def compare(
    before: Mapping[str, Sequence[Row]], after: Mapping[str, Sequence[Row]], least: float = LEAST_EFFECT
) -> Iterator[Change]:
    """Yields what both sides measured. The runs are the unit: of rows that one run has twice, the last counts.

    Rows that have a limit are compared by the share of it if that repeats better within the sides than the time.
    """
    sides = [_costs(side) for side in (before, after)]
    for key in sides[0]:
        if key not in sides[1]:
            continue
        first, second = (side[key] for side in sides)
        times, shares = ([[cost[of] for cost in side] for side in (first, second)] for of in (0, 1))
        by_share = math.inf not in (*shares[0], *shares[1]) and sum(map(spread, shares)) < sum(
            map(spread, times)
        )
        costs = shares if by_share else times
        by = "share" if by_share else "time"
        yield Change(key, by, (len(first), len(second)), compare_runs(costs[0], costs[1], least))


def _costs(runs: Mapping[str, Sequence[Row]]) -> dict[tuple[Any, ...], list[tuple[float, float]]]:
    """Returns the (cost, cost in units of the limit, if there is one) of each run, by the key of the row."""
    found: dict[tuple[Any, ...], dict[str, tuple[float, float]]] = {}
    for run, rows in runs.items():
        for row in rows:
            kind = KINDS.get(str(row.get("kind")))
            if kind is None or not kind.cost or perhaps(row, kind.cost) is None:
                continue
            share = perhaps(row, "of_limit")
            found.setdefault(key_of(row), {})[run] = (
                number(row, kind.cost),
                1 / share if share else math.inf,
            )
    return {key: list(of.values()) for key, of in found.items()}


def side_of(path: Path) -> dict[str, list[Row]]:
    """Returns the runs of a results file, or of all in a folder. Raises ConfigError."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return {f"{file.name} {run}": rows for file in files for run, rows in runs_of(read_rows(file)).items()}


def measured(sides: Sequence[Path], runs: int, command: Sequence[str]) -> list[dict[str, list[Row]]]:
    """Runs `kvlink bench COMMAND --json` of each side as often, each time in a new process.

    The sides take turns, and another one begins each time, so that a drift of the machine meets both. A side is a
    checkout or an environment. Raises ConfigError.
    """
    starts = [_start_of(side) for side in sides]
    with TemporaryDirectory() as folder:
        found = [Path(folder, str(number)) for number in range(len(sides))]
        for each in found:
            each.mkdir()
        for run in range(runs):
            for number in sorted(range(len(sides)), reverse=bool(run % 2)):
                line = [*starts[number], "bench", *command, "--json"]
                _run(line, sides[number], found[number] / f"{run}.jsonl")
        return [side_of(each) for each in found]


def _run(line: Sequence[str], side: Path, to: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with to.open("w") as output:
        try:
            done = subprocess.run(line, cwd=side, env=environment, stdout=output, timeout=_RUN_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"`{' '.join(line)}` did not run: {error}") from error
    if done.returncode:
        raise ConfigError(f"`{' '.join(line)}` ended with status {done.returncode}; run it alone to see why")


def _start_of(side: Path) -> list[str]:
    """Returns the beginning of a command line for a checkout, or for an environment. Raises ConfigError."""
    for folder in (side / ".venv", side):
        if (folder / "bin" / "python").exists():
            return [str((folder / "bin" / "python").absolute()), "-m", "kvlink"]
    if (side / "kvlink" / "__main__.py").exists():
        return [sys.executable, "-m", "kvlink"]
    raise ConfigError(
        f"{side} is neither a results file, nor a checkout of kvlink, nor an environment (bin/python)"
    )
