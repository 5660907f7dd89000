# SPDX-License-Identifier: Apache-2.0
"""The regression gate. `make test-instructions` holds it; here: that it would notice."""

from __future__ import annotations

import shutil

import pytest

from kvlink import _bench, _core
from kvlink.benchmarks.instructions import work
from kvlink.benchmarks.instructions.gate import CASES, Case, GateError, compare, count
from kvlink.errors import ConfigError


@pytest.mark.parametrize(("counted", "holds"), [(1000, True), (1009, True), (1011, False), (989, False)])
def test_a_hundredth_more_or_less_is_a_change(counted: int, holds: bool) -> None:
    [change] = compare({"plan": counted}, {"plan": 1000})
    assert change.holds is holds


def test_a_baseline_of_other_cases_is_refused() -> None:
    with pytest.raises(ConfigError, match="--update"):
        compare({"plan": 1}, {"plan": 1, "post": 1})


@pytest.mark.parametrize("name", ["plan", "settle", "sweep", "post", "pull"])
def test_the_work_runs_on_its_own(name: str) -> None:
    if name == "post" and not hasattr(_bench, "post_ns"):
        pytest.skip("built without verbs")
    work.CASES[name](_core, 3)


@pytest.mark.slow
def test_counts_repeat() -> None:
    if not shutil.which("valgrind"):
        pytest.skip("valgrind is not installed")
    plan = CASES["plan"]._replace(rounds=2)
    assert count(plan) == pytest.approx(count(plan), rel=0.001)
    with pytest.raises(GateError, match="never called"):
        count(Case("plan", "kvlink::nothing(*", 1))
