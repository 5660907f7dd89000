# SPDX-License-Identifier: Apache-2.0
"""The cost model that `explain()` predicts with."""

from __future__ import annotations

import pytest

from kvlink.transfer.cost_model import Cost, FittedCost


def test_prediction_adds_start_operations_and_bytes() -> None:
    assert Cost(start_us=2, op_ns=100, gib_per_s=1).predict_us(10, 2**30) == pytest.approx(2 + 1 + 1e6)


def test_a_fitted_cost_follows_the_median_of_what_it_saw() -> None:
    cost = FittedCost(Cost(0, 0, 1))
    for measured_us in (2e6, 2e6, 50e6):
        cost.learn(1, 2**30, measured_us)
    assert cost.predict_us(1, 2**29) == pytest.approx(1e6)


def test_old_pulls_are_forgotten() -> None:
    cost = FittedCost(Cost(0, 0, 1))
    cost.learn(1, 2**30, 9e6)
    for _ in range(32):
        cost.learn(1, 2**30, 1e6)
    assert cost.predict_us(1, 2**30) == pytest.approx(1e6)


def test_small_pulls_do_not_spoil_the_prediction_of_large_ones() -> None:
    cost = FittedCost(Cost(0, 0, 1))
    for _ in range(9):
        cost.learn(1, 1 << 10, 50 * cost.prior.predict_us(1, 1 << 10))
    cost.learn(1, 1 << 24, 2 * cost.prior.predict_us(1, 1 << 24))
    assert cost.predict_us(1, 1 << 24) == pytest.approx(2 * cost.prior.predict_us(1, 1 << 24))
    assert cost.predict_us(1, 1 << 11) == pytest.approx(50 * cost.prior.predict_us(1, 1 << 11))
