# SPDX-License-Identifier: Apache-2.0
"""Fixed seeds of the simulation, in the gate. A failure names the command that runs its seed again."""

from __future__ import annotations

import pytest
from control_simulation.running import simulate

SEEDS = (*range(24), 1352345047)
"""The last one had readers that went back to a stopped coordinator which other calls had left."""

_virtual_s: dict[int, float] = {}


@pytest.mark.parametrize("seed", SEEDS)
def test_no_seed_violates_what_must_hold(seed: int) -> None:
    outcome = simulate(seed)
    assert not outcome.violations, str(outcome)
    _virtual_s[seed] = outcome.virtual_s


def test_they_are_long_enough_together() -> None:
    if len(_virtual_s) < len(SEEDS):
        pytest.skip("not all of them ran")
    assert sum(_virtual_s.values()) > 10_000


@pytest.mark.parametrize("seed", [1, 5], ids=["memory", "etcd"])
def test_a_seed_takes_the_same_turns_again(seed: int) -> None:
    first, again, other = simulate(seed), simulate(seed), simulate(seed + 1)
    assert (first.trace, first.virtual_s) == (again.trace, again.virtual_s)
    assert first.trace != other.trace
