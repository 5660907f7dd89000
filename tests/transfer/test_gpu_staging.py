# SPDX-License-Identifier: Apache-2.0
"""Staging and bounce buffers of GPU memory: when there are some, and which log lines name them."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvlink import BlockPool, WorkerConfig
from kvlink.layout import Geometry, dense
from kvlink.transfer.explain import PathTaken
from kvlink.transfer.gpu_staging import (
    bouncing_ends,
    staging_for,
    warn_if_unserved,
    warn_of_path,
    warn_of_pool,
    warn_of_staging,
)
from kvlink.transfer.pool import Region
from kvlink.types import TransportCard

LAYOUT = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=2))
NO_SUCH_GPU = 99
ON_GPU = BlockPool([Region(1 << 40, LAYOUT.region_bytes[0], None, None, gpu=NO_SUCH_GPU)], LAYOUT)
PATH = PathTaken("prefill-1", "verbs", 1, (), (), (), (), 65536, 16 << 20, 420.0, 400.0, False)
VERBS = TransportCard("verbs", b"", (b"key",), (b"slots", b"words"))
TCP = TransportCard("tcp", b"", (b"key",), (b"slots", b"words"), bounces=True)
SHM = TransportCard("shm", b"", (), (), "nobody reaches in", bounces=True)


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


def test_the_ends_are_named() -> None:
    assert bouncing_ends(True, True) == ("reader", "owner")
    assert bouncing_ends(False, True) == ("owner",)
    assert bouncing_ends(False, False) == ()


@pytest.mark.parametrize(
    ("cards", "level"),
    [
        ((VERBS, TCP), logging.INFO),
        ((SHM, TCP), logging.WARNING),
        ((replace(VERBS, refused="no dma-buf", bounces=True), TCP), logging.WARNING),
        ((VERBS,), None),
    ],
)
def test_a_worker_warns_when_peers_have_no_other_way(
    cards: tuple[TransportCard, ...], level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvlink.staging"):
        warn_of_pool(ON_GPU, cards)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    if level is not None:
        assert f"device=cuda:{NO_SUCH_GPU} over=" in caplog.text
        assert all(card.refused in caplog.text for card in cards)


def test_a_path_that_bounces_is_a_warning_with_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_path("prefill-1", "tcp", ("reader", "owner"), ["not verbs: no NIC serves GPU 0000:1b:00.0"])
    assert "owner=prefill-1 transport=tcp at=reader,owner; not verbs: no NIC serves GPU" in caplog.text


def test_explain_says_bounce() -> None:
    path = PathTaken("prefill-1", "tcp", 1, (), (), ("owner",), (), 4, 4096, 10.0, 12.0, True)
    assert "1 lane(s), bounce at owner" in str(path)
    assert "bounce at reader and owner" in str(replace(path, bounces_at=("reader", "owner")))
    assert "bounce" not in str(replace(path, bounces_at=()))


@pytest.mark.parametrize(
    ("gpu", "hip", "refused", "said"),
    [
        (None, None, ("", "no NIC"), None),
        (
            None,
            None,
            ("not here", "no NIC"),
            "no transport serves this worker device=cpu reason=cuda: not here; tcp: no NIC",
        ),
        (
            0,
            None,
            ("libcuda.so.1 is absent", "GPU memory"),
            "device=cuda:0 reason=cuda: libcuda.so.1 is absent",
        ),
        (0, "6.4", ("libcuda.so.1 is absent", "GPU memory"), "device=cuda:0 (an AMD GPU with ROCm"),
    ],
    ids=["served", "host", "no driver in the container", "ROCm"],
)
def test_a_worker_that_nobody_can_read_says_so(
    gpu: int | None,
    hip: str | None,
    refused: tuple[str, str],
    said: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(version=SimpleNamespace(hip=hip)))
    cards = [
        TransportCard(name, b"", (), (), why) for name, why in zip(("cuda", "tcp"), refused, strict=True)
    ]
    warn_if_unserved(cast(Any, SimpleNamespace(gpu=gpu)), cards)
    assert [record.levelno for record in caplog.records] == ([logging.WARNING] if said else [])
    assert said is None or said in caplog.text
