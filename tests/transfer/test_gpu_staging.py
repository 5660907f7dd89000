# SPDX-License-Identifier: Apache-2.0
"""Where there is a staging buffer, and what is said of it."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kvlink import BlockPool, WorkerConfig
from kvlink.layout import Geometry, dense
from kvlink.transfer.explain import PathTaken
from kvlink.transfer.gpu_staging import staging_for, warn_of_staging
from kvlink.transfer.pool import Region

LAYOUT = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=2))
NO_SUCH_GPU = 99
ON_GPU = BlockPool([Region(1 << 40, LAYOUT.region_bytes()[0], None, None, gpu=NO_SUCH_GPU)], LAYOUT)
PATH = PathTaken("prefill-1", "verbs", 1, (), (), (), (), 65536, 16 << 20, 420.0, 400.0, False)


@pytest.mark.parametrize(
    ("choice", "transports"),
    [("never", {"verbs", "cuda"}), ("auto", {"cuda"}), ("auto", set()), ("always", set())],
)
def test_there_is_none_where_it_is_of_no_use(
    choice: str, transports: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert staging_for(ON_GPU, WorkerConfig(staging=choice), transports) is None
    assert staging_for(BlockPool.allocate(LAYOUT), WorkerConfig(staging="always"), {"verbs"}) is None
    assert not caplog.messages


@pytest.mark.parametrize(("choice", "transports"), [("auto", {"verbs"}), ("always", {"cuda"})])
def test_a_gpu_that_gives_no_memory_is_done_without_and_said(
    choice: str, transports: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert staging_for(ON_GPU, WorkerConfig(staging=choice), transports) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "no staging buffer" in record.message
    assert f"device=cuda:{NO_SUCH_GPU}" in record.message


def test_a_transport_that_goes_without_is_said(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_staging(ON_GPU, "")
    assert not caplog.messages
    warn_of_staging(ON_GPU, "verbs: cannot register 16777216 bytes")
    assert "cannot register 16777216 bytes" in caplog.messages[0]


def test_explain_gives_both_predictions() -> None:
    assert "predicted 420 us, took 400 us" in str(PATH)
    assert "staged" not in str(PATH)
    with_buffer = replace(PATH, predicted_direct_us=5243.0, predicted_staged_us=420.0)
    assert "(1 lane(s), direct, staged predicted 420 us, not encrypted)" in str(with_buffer)
    assert "staged on the GPU, direct predicted 5243 us" in str(replace(with_buffer, staged=True))
