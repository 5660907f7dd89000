# SPDX-License-Identifier: Apache-2.0
"""CUDA pools over transports that do not reach a GPU: staged in pinned host memory by the real driver. No NIC."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_cuda_pools import BLOCKS, LAYOUT, by_heads, converted, cuda_pool, equal

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.errors import TransportUnavailable

ALL = range(BLOCKS)
LEAST = 4 << 20


@pytest.fixture
def host_pool() -> BlockPool:
    """Random bytes."""
    import torch

    pool = BlockPool.allocate(LAYOUT)
    for region in range(len(pool.regions)):
        pool.torch(region).random_(0, 256)
    torch.cuda.synchronize()
    return pool


def differing(one: BlockPool, other: BlockPool) -> int:
    return sum(int((one.torch(n).cpu() != other.torch(n).cpu()).sum()) for n in range(len(one.regions)))


def pulled(owner: BlockPool, reader: BlockPool, **options: object) -> str:
    """Pulls everything three times, cold and warm; returns what `explain()` says."""
    import torch

    config = WorkerConfig.from_env(**{"bounce_bytes": LEAST, **options})
    with Worker(owner, "owner", config=config) as exporter, Worker(reader, "reader", config=config) as taker:
        for count in range(3):
            for region in range(len(reader.regions)):
                reader.torch(region).fill_(count)
            torch.cuda.synchronize()
            pull = taker.pull(exporter.offer(f"r{count}", ALL), ALL)
            assert pull.wait(60)
            assert differing(owner, reader) == 0
        return str(pull.explain()[0])


def test_from_gpu_to_gpu_over_tcp(allocator: str) -> None:
    one, other = cuda_pool(1), cuda_pool(2)
    assert "bounce at reader and owner" in pulled(one, other, transports="tcp")
    assert equal(one, other)


@pytest.mark.parametrize("transport", ["loopback", "shm", "cma", "tcp"])
def test_from_host_to_gpu(transport: str, host_pool: BlockPool) -> None:
    output = pulled(host_pool, cuda_pool(2), transports=transport)
    assert f"over {transport}" in output
    assert "bounce at reader" in output


def test_from_gpu_to_host_over_tcp(host_pool: BlockPool) -> None:
    assert "bounce at owner" in pulled(cuda_pool(1), host_pool, transports="tcp")


def test_another_layout_is_converted_on_the_way() -> None:
    """From pinned memory, by the kernel: a copy for each row of each head would take a second."""
    owner, reader = cuda_pool(1), by_heads()
    config = WorkerConfig.from_env(bounce_bytes=LEAST, transports="tcp")
    with Worker(owner, "owner", config=config) as exporter, Worker(reader, "reader", config=config) as taker:
        taker.pull(exporter.offer("r", ALL), ALL).wait(60)
        assert converted(owner, reader)


def test_bytes_are_there_for_work_launched_next(host_pool: BlockPool) -> None:
    import torch

    reader = cuda_pool(2)
    config = WorkerConfig(transports="tcp")
    with (
        Worker(host_pool, "owner", config=config) as exporter,
        Worker(reader, "taker", config=config) as taker,
    ):
        for count in range(20):
            reader.torch().fill_(count)
            torch.cuda.synchronize()
            taker.pull(exporter.offer(f"r{count}", ALL), ALL).wait(60)
            sums = reader.torch().sum(dtype=torch.int64)  # on torch's stream, not on kvlink's
            assert int(sums) == int(host_pool.torch().sum(dtype=torch.int64))


def test_a_nic_without_gpudirect_stages_what_it_reads(nic: str, host_pool: BlockPool) -> None:
    output = pulled(host_pool, cuda_pool(2), transports="verbs", nics=nic, gpudirect="bounce")
    assert "over verbs" in output
    assert "bounce at reader" in output


def test_where_it_is_not_allowed_it_is_refused() -> None:
    config = WorkerConfig(transports="tcp", gpudirect="dma-buf,peermem")
    with (
        Worker(cuda_pool(1), "owner", config=config) as exporter,
        Worker(cuda_pool(2), "reader", config=config) as taker,
        pytest.raises(TransportUnavailable, match="add it to KVLINK_GPUDIRECT"),
    ):
        taker.pull(exporter.offer("r", ALL), ALL).wait(10)


@pytest.fixture(autouse=True)
def nothing_stays_pinned() -> Iterator[None]:
    """Whatever a test left would make the next registration of the same pages fail."""
    import gc

    yield
    gc.collect()
