# SPDX-License-Identifier: Apache-2.0
"""`kvlink bench growth`: its exponents, and that each growth can be measured."""

from __future__ import annotations

import pytest

from kvlink.benchmarks.measurements import growth


def test_the_exponent_of_each_cost_follows_its_values() -> None:
    numbers = [1, 10, 100]
    costs = {"flat": 0.0, "linear": 1.0, "square": 2.0}
    [rows] = growth.parts(
        [growth.Growth("n", numbers, lambda n: {name: 3.0 * n**power for name, power in costs.items()})]
    )
    seen = list(rows)
    assert [row["number"] for row in seen if row["cost"] == "flat" and "number" in row] == numbers
    found = {row["cost"]: row for row in seen if "exponent" in row}
    assert {name: row["exponent"] for name, row in found.items()} == pytest.approx(costs, abs=1e-9)
    assert [row["holds"] for row in found.values()] == [True, True, False]


@pytest.mark.verify
@pytest.mark.parametrize("which", growth.GROWTHS, ids=[each.of for each in growth.GROWTHS])
def test_each_growth_is_measured(which: growth.Growth) -> None:
    [rows] = growth.parts([which._replace(numbers=(1, 4))])
    seen = list(rows)
    assert all(row["value"] > 0 for row in seen if "value" in row)
    assert {row["cost"] for row in seen if "exponent" in row} == {row["cost"] for row in seen}
