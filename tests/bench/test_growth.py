# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench growth`: its exponents, and that each growth can be measured."""

from __future__ import annotations

import math
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlink.benchmarks import app
from kvlink.benchmarks.harness.results import fails
from kvlink.benchmarks.measurements import growth


def test_the_exponent_of_each_cost_follows_its_values() -> None:
    numbers = [1, 10, 100, 1000]
    costs = {"flat": 0.0, "linear": 1.0, "square": 2.0}
    [rows] = growth.parts(
        [growth.Growth("n", numbers, lambda n: {name: 3.0 * n**power for name, power in costs.items()})]
    )
    seen = list(rows)
    assert [row["number"] for row in seen if row["cost"] == "flat" and "number" in row] == numbers
    found = {row["cost"]: row for row in seen if "exponent" in row}
    assert {name: row["exponent"] for name, row in found.items()} == pytest.approx(costs, abs=1e-9)
    assert [row["holds"] for row in found.values()] == [True, True, False]


def verdict(curve: dict[int, float], bare: dict[int, float] | None = None) -> dict[str, Any]:
    costs = {"cost": curve} | ({"bare": bare} if bare else {})
    of = growth.Growth(
        "n",
        list(curve),
        lambda n: {name: values[n] for name, values in costs.items()},
        "bare" if bare else "",
    )
    [rows] = growth.parts([of])
    return next(row for row in rows if row["cost"] == "cost" and "exponent" in row)


BLOCKS = [4**power for power in range(9)]


def test_a_flat_start_does_not_hide_a_quadratic_tail() -> None:
    """A line through all points has the exponent 0.78 here."""
    row = verdict({n: 4 + 0.6 * (n / 256) ** 2 for n in BLOCKS})
    assert row["exponent"] == pytest.approx(2, abs=0.05)
    assert row["holds"] is False
    assert fails({"kind": "growth", **row})


def test_a_start_up_and_a_linear_cost_hold() -> None:
    assert verdict({n: 5 + 0.1 * n for n in BLOCKS})["holds"] is True
    assert verdict({n: 3.0 * n * math.log2(n + 1) for n in BLOCKS})["holds"] is True


def test_a_step_may_be_as_steep_as_that_of_the_bare_copy() -> None:
    """The last step leaves the caches: what it costs the bare copy too is no growth of kvlink."""
    copy = {n: 0.05 * n * (2 if n > 20_000 else 1) for n in BLOCKS}
    pull = {n: 5 + 1.2 * us for n, us in copy.items()}
    assert verdict(pull)["holds"] is False
    assert verdict(pull, copy)["holds"] is True
    assert verdict({n: us * n for n, us in pull.items()}, copy)["holds"] is False
    [rows] = growth.parts([growth.Growth("n", BLOCKS, lambda n: {"bare": copy[n]}, "bare")])
    assert "holds" not in [*rows][-1], "the machine is not judged"


@pytest.mark.parametrize(("power", "holds", "code"), [(1, "yes", 0), (2, "no", 1)])
def test_the_command_says_what_holds_in_eighty_columns(
    power: int, holds: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = growth.Growth(
        "prefixes of the directory", [1, 10, 100], lambda n: {"publish_all_cpu_ms": 2.0 * n**power}
    )
    monkeypatch.setattr(growth, "GROWTHS", [of])
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["growth"])
    assert done.exit_code == code
    verdict = next(line for line in reversed(done.output.splitlines()) if "publish_all" in line)
    assert verdict.split()[-3:] == [str(power), holds, "100"]


@pytest.mark.verify
@pytest.mark.parametrize("which", growth.GROWTHS, ids=[each.of for each in growth.GROWTHS])
def test_each_growth_is_measured(which: growth.Growth) -> None:
    [rows] = growth.parts([which._replace(numbers=(1, 4))])
    seen = list(rows)
    assert all(row["value"] > 0 for row in seen if "value" in row)
    assert {row["cost"] for row in seen if "exponent" in row} == {row["cost"] for row in seen}
