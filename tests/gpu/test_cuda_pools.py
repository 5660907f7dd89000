# SPDX-License-Identifier: Apache-2.0
"""Pools that are CUDA tensors: as kvlink describes them, and pulled from GPU to GPU through a NIC."""

from __future__ import annotations

import pytest

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.config.rdma_config import Way
from kvlink.errors import ConfigError, TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver, Kind, Ordering, decide, export, inspect
from kvlink.layout import Geometry, Order, Regions, dense

BLOCKS = 256
GEOMETRY = Geometry(num_layers=4, total_heads=8, row_bytes=256, num_blocks=BLOCKS)
LAYOUT = dense(GEOMETRY, Order.NHD, Regions.PER_LAYER)
BY_HEADS = dense(GEOMETRY, Order.HND, Regions.PER_LAYER)


def cuda_pool(seed: int) -> BlockPool:
    """Random bytes that are in place before any NIC looks."""
    import torch

    torch.manual_seed(seed)
    tensors = [
        torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda") for size in LAYOUT.region_bytes
    ]
    torch.cuda.synchronize()
    return BlockPool.from_tensors(tensors, LAYOUT)


def by_heads() -> BlockPool:
    """Zeros, in a layout where the tokens of a head adjoin."""
    return BlockPool.allocate(BY_HEADS, gpu=0)


def converted(one: BlockPool, by_heads: BlockPool) -> bool:
    """Whether both hold the same, each in its own layout."""
    import torch

    shape = (2, BLOCKS, 16, 8, 256)  # K and V, blocks, tokens, heads, bytes
    turned = (2, BLOCKS, 8, 16, 256)
    return all(
        torch.equal(
            one.torch(n)[: LAYOUT.region_bytes[n]].view(shape).transpose(2, 3),
            by_heads.torch(n)[: BY_HEADS.region_bytes[n]].view(turned),
        )
        for n in range(len(one.regions))
    )


def equal(one: BlockPool, other: BlockPool) -> bool:
    return all(bool((one.torch(n) == other.torch(n)).all()) for n in range(len(one.regions)))


def test_a_cuda_pool_knows_its_device_and_shares_its_memory() -> None:
    import torch

    pool = cuda_pool(1)
    assert pool.gpu == 0
    pool.torch()[5] = 77
    assert torch.from_dlpack(pool)[5] == 77
    with pytest.raises(ConfigError, match="numpy cannot view cuda:0"):
        pool.numpy()


def test_two_devices_are_two_pools() -> None:
    import torch

    sizes = LAYOUT.region_bytes
    mixed = [
        torch.zeros(size, dtype=torch.uint8, device=("cuda", "cpu")[n % 2]) for n, size in enumerate(sizes)
    ]
    with pytest.raises(ConfigError, match="on several devices"):
        BlockPool.from_tensors(mixed, LAYOUT)


def test_memory_is_described_as_it_was_made(driver: CudaDriver, allocator: str) -> None:
    region = cuda_pool(1).regions[0]
    facts, gpu, _ = inspect(driver, region.address, region.num_bytes)
    assert facts.kind is (Kind.VMM if allocator == "expandable segments" else Kind.CUDA_MALLOC)
    assert facts.mapped
    assert (facts.num_devices, gpu.ordinal) == (1, 0)
    placement = cuda_pool(1).placements(driver)[0]
    assert f"pci={gpu.bus_id}" in str(placement)
    assert (placement.allocations[0].granularity > 0) == (allocator == "expandable segments")


def test_memory_is_exported_as_a_dma_buf(driver: CudaDriver, allocator: str) -> None:
    region = cuda_pool(1).regions[0]
    try:
        exported = export(driver, region.address, region.num_bytes, allowed=(Way.DMA_BUF,))
    except TransportUnavailable as error:
        pytest.skip(str(error))
    with exported:
        assert len(exported.fds) == 1
    assert exported.fds == ()


def test_the_driver_flushes(driver: CudaDriver) -> None:
    gpu = driver.gpu(0)
    if not gpu.flush_from_host:
        pytest.skip("this GPU offers no flush from the host")
    driver.flush(0, Ordering.OWNER)


@pytest.mark.parametrize("way", [Way.DMA_BUF, Way.PEERMEM])
def test_a_pull_from_gpu_to_gpu(driver: CudaDriver, nic: str, allocator: str, way: Way) -> None:
    owner_pool, reader_pool = cuda_pool(1), cuda_pool(2)
    region = owner_pool.regions[0]
    try:
        decide(inspect(driver, region.address, region.num_bytes)[0], (way,))
    except TransportUnavailable as error:
        pytest.skip(str(error))
    config = WorkerConfig(transports="verbs", nics=nic, gpudirect=way.value)
    with (
        Worker(owner_pool, "owner", config=config) as owner,
        Worker(reader_pool, "reader", config=config) as reader,
    ):
        for count in range(3):  # cold, then warm
            reader_pool.torch().fill_(count)
            pull = reader.pull(owner.offer(f"r{count}", range(BLOCKS)), range(BLOCKS))
            pull.wait(20)
            assert equal(owner_pool, reader_pool)
        (path,) = pull.explain()
        assert path.nics == (f"{nic}->{nic}",)


def test_a_flush_follows_every_pull_where_the_gpu_asks_for_it(driver: CudaDriver, nic: str) -> None:
    config = WorkerConfig(transports="verbs", nics=nic)
    gpu = driver.gpu(0)
    with Worker(cuda_pool(1), "worker", config=config) as worker:
        asked = gpu.ordering < Ordering.OWNER and gpu.flush_from_host
        assert (worker._engine.flush_gpu_writes is not None) == asked
