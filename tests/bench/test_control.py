# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the control plane: what it counts. How fast that was says nothing here."""

from __future__ import annotations

import gc

import pytest

from kvlink.benchmarks.measurements import control
from kvlink.coordinator.coordinator import tune_gc

pytestmark = pytest.mark.verify


def test_every_hand_off_is_made_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in ("_LATENCY_ROUNDS", "_UNARY_HANDOFFS", "_STREAM_HANDOFFS"):
        monkeypatch.setattr(control, count, 100)
    known, awaited, unary, batched, limit = control.rows(workers=2)
    for latency in (known, awaited):
        assert latency["rounds"] == 100
        assert 0 < latency["p50_us"] <= latency["max_us"]
    for throughput in (unary, batched, limit):
        assert throughput["handoffs"] == 100
        assert throughput["handoffs_per_s"] > 0
        assert throughput["coordinator_cpu_us"] > 0
    assert all(row["verified"] for row in (known, awaited, unary, batched))


def test_a_coordinators_collector_starts_from_what_it_holds_by_then() -> None:
    before, held = gc.get_threshold(), gc.get_freeze_count()
    try:
        tune_gc()
        assert gc.get_freeze_count() > held
        assert gc.get_threshold() > before
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
