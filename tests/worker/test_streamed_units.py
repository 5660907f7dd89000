# SPDX-License-Identifier: Apache-2.0
"""The reader of a stream knows how much of it has arrived, and why its deadline has passed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from waiting import eventually

from kvlink import BlockPool, Geometry, ReadyUnit, TransferTimeout, Worker, dense

LAYOUT = dense(Geometry(num_layers=4, total_heads=1, row_bytes=64, num_blocks=8))
UNITS = {ReadyUnit.BLOCKS: 3, ReadyUnit.LAYERS: 4, ReadyUnit.TOKENS: 48}


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    with ExitStack() as opened:
        owner, reader = (
            opened.enter_context(Worker(BlockPool.allocate(LAYOUT), name, transports="loopback"))
            for name in ("p", "d")
        )
        yield owner, reader


@pytest.mark.parametrize("unit", ReadyUnit, ids=lambda unit: unit.name)
def test_a_reader_knows_how_much_has_arrived(pair: tuple[Worker, Worker], unit: ReadyUnit) -> None:
    owner, reader = pair
    pull = reader.pull(owner.offer("r", [1, 2, 3], ready=0, ready_unit=unit), into=[4, 5, 6])
    assert pull.validated_units == 0
    owner.set_ready("r", 2)
    eventually(lambda: pull.validated_units == 2)
    owner.set_ready("r", UNITS[unit])
    pull.wait(20)
    assert pull.validated_units == UNITS[unit]


@pytest.mark.parametrize(
    ("ready", "what"),
    [
        (0, r"ms, before the owner had written anything"),
        (1, r"ms with 8192 of 8192 bytes landed that the owner had written"),
    ],
)
def test_the_deadline_of_a_stream_says_what_was_missing(
    pair: tuple[Worker, Worker], ready: int, what: str
) -> None:
    owner, reader = pair
    reader.pull(owner.offer("warm", [0]), into=[0]).wait(20)
    pull = reader.pull(owner.offer("r", [1, 2, 3], ready=ready), into=[4, 5, 6], timeout_s=0.05)
    with pytest.raises(TransferTimeout, match=what):
        pull.wait(20)
