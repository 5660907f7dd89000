# SPDX-License-Identifier: Apache-2.0
"""Staging of GPU memory is said, and how loudly."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kvlink.layout import Geometry, Order, Regions, dense
from kvlink.transfer.explain import PathTaken
from kvlink.transfer.gpu_staging import bouncing_ends, warn_of_path, warn_of_pool
from kvlink.transfer.pool import BlockPool, Region
from kvlink.types import TransportCard

LAYOUT = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=2), Order.NHD, Regions.ONE)
POOL = BlockPool([Region(1 << 47, LAYOUT.region_bytes()[0], None, None, gpu=3)], LAYOUT)
VERBS = TransportCard("verbs", b"", (b"key",), (b"slots", b"words"))
TCP = TransportCard("tcp", b"", (b"key",), (b"slots", b"words"), bounces=True)
SHM = TransportCard("shm", b"", (), (), "nobody reaches in", bounces=True)


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
        warn_of_pool(POOL, cards)
    assert [record.levelno for record in caplog.records] == ([] if level is None else [level])
    if level is not None:
        assert "device=cuda:3 over=" in caplog.text
        assert all(card.refused in caplog.text for card in cards)


def test_a_path_that_bounces_is_a_warning_with_the_reasons(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_path("prefill-1", "tcp", ("reader", "owner"), ["not verbs: no NIC serves GPU 0000:1b:00.0"])
    assert "owner=prefill-1 transport=tcp at=reader,owner; not verbs: no NIC serves GPU" in caplog.text


def test_explain_says_bounce() -> None:
    path = PathTaken("prefill-1", "tcp", 1, (), (), ("owner",), (), 4, 4096, 10.0, 12.0, True)
    assert "1 lane(s), bounce at owner" in str(path)
    assert "bounce at reader and owner" in str(replace(path, bounces_at=("reader", "owner")))
    assert "bounce" not in str(replace(path, bounces_at=()))
