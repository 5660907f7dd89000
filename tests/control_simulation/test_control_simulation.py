# SPDX-License-Identifier: Apache-2.0
"""Fixed seeds of the simulation, in the gate. A failure names the command that runs its seed again."""

from __future__ import annotations

import pytest
from control_simulation.running import simulate

GROUPS = 10
SEEDS_A_GROUP = 4


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_seed_violates_what_must_hold(group: int) -> None:
    outcomes = [simulate(group * SEEDS_A_GROUP + number) for number in range(SEEDS_A_GROUP)]
    failed = [str(outcome) for outcome in outcomes if outcome.violations]
    assert not failed, "\n".join(failed)
    assert sum(outcome.virtual_s for outcome in outcomes) > 10_000 / GROUPS


def test_a_seed_takes_the_same_turns_again() -> None:
    first, again, other = simulate(1), simulate(1), simulate(2)
    assert (first.trace, first.virtual_s) == (again.trace, again.virtual_s)
    assert first.trace != other.trace
