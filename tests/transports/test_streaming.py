# SPDX-License-Identifier: Apache-2.0
"""Pulls that start before the owner has written all: they follow `ready`, block by block or layer by layer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from transports.pools import PoolSpec, Source, expected, poison, random_contents, same, snapshot, wide
from transports.processes import RemoteWorker, eventually

from kvlink import Worker
from kvlink.errors import StaleBlocks, TransferTimeout, UnknownRequest

NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]

MODEL = {"num_layers": 6, "total_heads": 2, "row_bytes": 64, "num_blocks": 32}
OWNER = PoolSpec(block_tokens=16, order="HND", **MODEL)
READER = PoolSpec(block_tokens=8, order="PAIRED_NHD", **MODEL)
OWNER_BLOCKS = [5, 30, 2, 17, 11, 8, 23, 1]
READER_BLOCKS = list(range(31, 15, -1))
UNITS = {"BLOCKS": len(OWNER_BLOCKS), "LAYERS": 6}
NUM_TOKENS = 123  # the last block is partial


def check(reader: Worker, before: list, seed: int, tokens: range, layers: range) -> None:
    source = Source(OWNER.layout(), random_contents(OWNER.layout(), seed), OWNER_BLOCKS)
    after = expected(before, reader.pool.layout, READER_BLOCKS, [source], tokens, layers)
    assert same(snapshot(reader.pool), after)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("tokens", "layers"), [((0, NUM_TOKENS), (0, 6)), ((37, 101), (1, 5))], ids=["whole", "part"]
)
def test_the_owner_writes_while_the_reader_pulls(
    transport: str,
    unit: str,
    tokens: tuple[int, int],
    layers: tuple[int, int],
    new_owner: NewOwner,
    new_reader: NewReader,
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    for seed in range(8):
        owner.do("fill", seed=1000 + seed)  # what was there before must not be taken for it
        before = poison(reader.pool, seed)
        ticket = owner.offer(OWNER_BLOCKS, num_tokens=NUM_TOKENS, ready=0, ready_unit=unit)
        pull = reader.pull(ticket, READER_BLOCKS, tokens=tokens, layers=layers)
        owner.do(
            "stream",
            request_id=ticket.request_id,
            blocks=OWNER_BLOCKS,
            seed=seed,
            unit=unit,
            most_ms=seed % 4,  # 0: all at once
        )
        assert pull.wait(20)
        check(reader, before, seed, range(*tokens), range(*layers))
        assert owner.fate_of(ticket.request_id) == "settled"


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_ready_comes_and_nothing_else(
    transport: str, unit: str, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    owner.do("fill", seed=3)
    before = poison(reader.pool, 3)
    ticket = owner.offer(OWNER_BLOCKS, num_tokens=NUM_TOKENS, ready=1, ready_unit=unit)
    pull = reader.pull(ticket, READER_BLOCKS)

    def ready(count: int) -> tuple[range, range]:
        return (
            (range(min(16 * count, NUM_TOKENS)), range(6))
            if unit == "BLOCKS"
            else (range(NUM_TOKENS), range(count))
        )

    source = Source(OWNER.layout(), random_contents(OWNER.layout(), 3), OWNER_BLOCKS)
    for count in (1, 2, 5):
        owner.do("set_ready", request_id=ticket.request_id, ready=count)
        after = expected(before, reader.pool.layout, READER_BLOCKS, [source], *ready(count))
        eventually(lambda after=after: same(snapshot(reader.pool), after))
        assert not pull.wait(0.01)
        assert same(snapshot(reader.pool), after)
    owner.do("set_ready", request_id=ticket.request_id, ready=2)  # never goes back
    owner.do("set_ready", request_id=ticket.request_id, ready=UNITS[unit])
    assert pull.wait(20)
    check(reader, before, 3, range(NUM_TOKENS), range(6))


def test_an_offer_aborted_in_the_middle_is_stale(
    transport: str, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    ticket = owner.offer(OWNER_BLOCKS, ready=3)
    pull = reader.pull(ticket, READER_BLOCKS)
    assert not pull.wait(0.02)
    owner.do("abort", request_id=ticket.request_id)
    with pytest.raises(StaleBlocks):
        pull.wait(20)
    assert owner.fate_of(ticket.request_id) == "aborted"
    with pytest.raises(UnknownRequest):
        owner.do("set_ready", request_id=ticket.request_id, ready=4)


def test_an_owner_that_never_finishes_runs_into_the_deadline(
    transport: str, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    ticket = owner.offer(OWNER_BLOCKS, ready=3)
    with pytest.raises(TransferTimeout):
        reader.pull(ticket, READER_BLOCKS, timeout_s=0.2).wait(20)
    owner.do("set_ready", request_id=ticket.request_id, ready=8)
    assert reader.pull(ticket, READER_BLOCKS).wait(20)


class SlowKernels:
    """As a torch.cuda.Event: not passed until it is told so."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.lost = False

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.passed.is_set()


def test_readers_wait_for_the_kernels_that_write_the_blocks(transport: str, new_reader: NewReader) -> None:
    exporter, taker = (new_reader(wide(8), transports=transport) for _ in range(2))
    kernels = SlowKernels()
    pull = taker.pull(exporter.offer("r", [1, 2], after=kernels), [3, 4], timeout_s=20)
    time.sleep(0.05)
    assert not pull.done()
    exporter.pool.numpy()[:] = 9  # later than the offer
    kernels.passed.set()
    pull.wait()
    assert (taker.pool.numpy().reshape(8, -1)[3:5] == 9).all()
    assert exporter.offer("again", [1, 2], after=kernels).ready == 2


def test_blocks_of_a_lost_device_are_never_used(transport: str, new_reader: NewReader) -> None:
    exporter, taker = (new_reader(wide(8), transports=transport) for _ in range(2))
    kernels = SlowKernels()
    pull = taker.pull(exporter.offer("r", [1, 2], after=kernels), [3, 4], timeout_s=20)
    kernels.lost = True
    with pytest.raises(StaleBlocks):
        pull.wait()
