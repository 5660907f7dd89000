# SPDX-License-Identifier: Apache-2.0
"""Offers: beside captures of CUDA graphs, and by NICs that are near host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware import machines

from kvlink import WorkerConfig, _core
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.transfer.device_work import has_ended
from kvlink.transfer.nic_registration import register_with_nics
from kvlink.transfer.pool import BlockPool


class Relaxed:
    """Stands for the guard of the core."""

    depth = 0

    def __enter__(self) -> None:
        Relaxed.depth += 1

    def __exit__(self, *_: object) -> None:
        Relaxed.depth -= 1


class Work:
    """Has ended, which it says only where a capture does not mind."""

    def query(self) -> bool:
        return Relaxed.depth == 1


def test_the_question_is_asked_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "RelaxedCapture", Relaxed)
    assert has_ended(Work())
    assert Relaxed.depth == 0


def test_the_guard_does_nothing_without_cuda() -> None:
    with _core.RelaxedCapture():
        pass


def test_host_memory_without_a_nic_opens_none_and_says_why(tmp_path: Path) -> None:
    machines.aws_p5(tmp_path)
    pool = BlockPool.allocate(dense(Geometry(2, 2, 64, 8)))
    registration = register_with_nics(pool, WorkerConfig(), root=tmp_path)
    assert list(registration.ports) == []
    assert registration.refused.startswith(
        "no NIC serves host memory: rdmap0s0:1 is an Elastic Fabric Adapter"
    )


def test_nothing_is_leased_before_the_start() -> None:
    engine = _core.Engine(1, ["tcp"], "127.0.0.1", 0, "", 16, 1, 0, 0, ())
    assert engine.take_ended() == []
    for asked in (
        lambda: engine.grant(1, 1, 0, 1.0),
        lambda: engine.grant_at(1, [(0, 1, 2)], 0, 1.0),
        lambda: engine.settle_local(0, 1),
        lambda: engine.abort(1),
        engine.lease_counts,
    ):
        with pytest.raises(ConfigError, match="has not started"):
            asked()
    engine.close()
