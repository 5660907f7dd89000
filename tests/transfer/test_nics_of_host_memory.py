# SPDX-License-Identifier: Apache-2.0
"""Host memory where no NIC serves it, and an engine that has not started."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware import machines

from kvlink import WorkerConfig, _core
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.transfer.nic_registration import register_with_nics
from kvlink.transfer.pool import BlockPool


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
        lambda: engine.settle_own(0, 1),
        lambda: engine.abort(1),
        engine.lease_counts,
    ):
        with pytest.raises(ConfigError, match="has not started"):
            asked()
    engine.close()
