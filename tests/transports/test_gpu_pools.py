# SPDX-License-Identifier: Apache-2.0
"""Pools in GPU memory without a GPU: who refuses them and how, and the flush that follows a pull into one."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from transports.pools import Contents, PoolSpec, poison, random_contents, same, snapshot
from transports.processes import RemoteWorker

from kvlink import BlockPool, Worker
from kvlink.errors import StaleBlocks, TransportUnavailable
from kvlink.transfer.pool import Region

HOST = "loopback,shm,cma,tcp"


def gpu_pool(spec: PoolSpec) -> BlockPool:
    """Addresses that belong to nobody: who follows one ends the tests."""
    beyond = 1 << 47  # behind the end of user space
    layout = spec.layout()
    return BlockPool([Region(beyond, size, None, None, gpu=0) for size in layout.region_bytes], layout)


def gpu_worker() -> Worker:
    return Worker(gpu_pool(PoolSpec()), "gpu", transports=HOST)


def test_the_card_says_why_gpu_memory_is_not_exported() -> None:
    with gpu_worker() as worker:
        for card in worker.card.transports:
            assert card.refused.endswith("use verbs (KVLINK_TRANSPORTS) or a pool in host memory"), card
            assert not card.pool_keys


def test_nobody_reads_from_gpu_memory_by_way_of_the_host() -> None:
    refused = pytest.raises(TransportUnavailable, match="gpu cannot export its pool: tcp reaches host memory")
    with gpu_worker() as owner, Worker(PoolSpec().make(), "reader", transports=HOST) as reader, refused:
        reader.pull(owner.offer("r", [0, 1]), [0, 1]).wait()


def test_nobody_reads_into_gpu_memory_by_way_of_the_host() -> None:
    refused = pytest.raises(TransportUnavailable, match="does not use tcp: tcp reaches host memory")
    with Worker(PoolSpec().make(), "owner", transports=HOST) as owner, gpu_worker() as reader, refused:
        reader.pull(owner.offer("r", [0, 1]), [0, 1]).wait()


@dataclass
class Flush:
    """Stands in for the GPU's: notes whether all bytes were in the destination when it was called."""

    pool: BlockPool
    complete: Contents
    seen: list[bool] = field(default_factory=list)
    fails: bool = False

    def __call__(self) -> None:
        if self.fails:
            raise TransportUnavailable("cuFlushGPUDirectRDMAWrites: CUDA_ERROR_LAUNCH_FAILED")
        self.seen.append(same(snapshot(self.pool), self.complete))


SPEC = PoolSpec()
ALL = range(SPEC.num_blocks)


@dataclass
class Flushed:
    """Makes an owner with contents and a reader that flushes. Holds nothing: tests may not outlive their pools."""

    new_owner: Callable[..., RemoteWorker]
    new_reader: Callable[..., Worker]

    def pair(self) -> tuple[RemoteWorker, Worker, Flush]:
        owner, reader = self.new_owner(SPEC, transports="tcp"), self.new_reader(SPEC, transports="tcp")
        owner.do("fill", seed=1)
        flush = Flush(reader.pool, random_contents(SPEC.layout(), 1))
        reader._engine.flush_gpu_writes = flush
        reader._pulls._plain = False  # as it is for a reader that has had its flush from the start
        return owner, reader, flush


@pytest.fixture
def flushed(new_owner: Callable[..., RemoteWorker], new_reader: Callable[..., Worker]) -> Flushed:
    return Flushed(new_owner, new_reader)


@pytest.mark.parametrize("settle", [True, False])
def test_one_flush_a_pull_once_all_has_landed(flushed: Flushed, settle: bool) -> None:
    owner, reader, flush = flushed.pair()
    for count in (1, 2):
        poison(reader.pool, 1)
        pull = reader.pull(owner.offer(ALL), ALL, settle=settle)
        assert flush.seen == [True] * (count - 1)
        assert pull.wait(10)
        assert pull.wait(0)
        assert flush.seen == [True] * count


def test_awaiting_flushes_too(flushed: Flushed) -> None:
    owner, reader, flush = flushed.pair()

    async def pulled() -> None:
        await reader.pull(owner.offer(ALL), ALL)

    asyncio.run(pulled())
    assert flush.seen == [True]


def test_a_pull_that_failed_is_not_flushed(flushed: Flushed) -> None:
    owner, reader, flush = flushed.pair()
    ticket = owner.offer(ALL)
    owner.do("abort", request_id=ticket.request_id)
    with pytest.raises(StaleBlocks):
        reader.pull(ticket, ALL).wait(10)
    assert flush.seen == []


def test_a_flush_that_fails_fails_the_pull_every_time(flushed: Flushed) -> None:
    owner, reader, flush = flushed.pair()
    flush.fails = True
    pull = reader.pull(owner.offer(ALL), ALL)
    for _ in range(2):
        with pytest.raises(TransportUnavailable, match="LAUNCH_FAILED"):
            pull.wait(10)


def test_explain_names_the_ports_that_carry_lanes(
    transport: str, new_owner: Callable[..., RemoteWorker], new_reader: Callable[..., Worker]
) -> None:
    owner, reader = (make(PoolSpec(), transports=transport) for make in (new_owner, new_reader))
    pull = reader.pull(owner.offer([1]), [2])
    pull.wait(20)
    (path,) = pull.explain()
    assert path.lanes >= 1
    if transport == "verbs":
        assert path.nics
        assert all(re.fullmatch(r"[\w.-]+:\d+->[\w.-]+:\d+( \d+%)?", pair) for pair in path.nics)
        assert path.nics[0] in str(path)
    elif transport == "fabric":
        assert path.nics == (os.environ.get("KVLINK_FABRIC_PROVIDER", path.nics[0]),)
        assert path.nics_left_out == ()
    else:
        assert (path.nics, path.nics_left_out) == ((), ())
