# SPDX-License-Identifier: Apache-2.0
"""The cost model; how it follows pulls is tested in tests/cpp/engine/cost_model_test.cc."""

from __future__ import annotations

import pytest

from kvlink.transfer.cost_model import PRIORS, Cost
from kvlink.transfer.engine import available_transports


def test_prediction_adds_start_operations_and_bytes() -> None:
    assert Cost(start_us=2, op_ns=100, gib_per_s=1).predict_us(10, 2**30) == pytest.approx(2 + 1 + 1e6)


def test_every_transport_has_a_prior() -> None:
    assert set(PRIORS) == set(available_transports())
    assert PRIORS["tcp"].start_us > PRIORS["shm"].start_us
