# SPDX-License-Identifier: Apache-2.0
"""NICs get ports by the place of a pool, and the memory of a GPU by a way that reaches it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from descriptors import descriptors, opened_since
from hardware import machines
from hardware.fake_cuda import HOPPER, FakeCuda, at

from kvlink import WorkerConfig, _core
from kvlink.config.rdma_config import Way
from kvlink.errors import ConfigError, TransportUnavailable
from kvlink.hardware.gpudirect import Gpu, Kind, Ordering
from kvlink.layout import Geometry, Order, Regions, dense
from kvlink.transfer.nic_registration import NicRegistration, register_with_nics
from kvlink.transfer.pool import BlockPool, Region

LAYOUT = dense(
    Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=8, block_tokens=4),
    Order.NHD,
    Regions.PER_LAYER,
)
SIZE = LAYOUT.region_bytes[0]
BASE = 0x7F0000000000
SECOND = BASE + (1 << 20) + 64  # in the middle of a page
CONFIG = WorkerConfig()


def gpu_pool() -> BlockPool:
    """Two regions of one GPU; nobody follows their addresses."""
    return BlockPool([Region(address, SIZE, None, None, gpu=0) for address in (BASE, SECOND)], LAYOUT)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    machines.hgx_h100(tmp_path).write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
    return tmp_path


@pytest.fixture
def gpu(root: Path) -> Gpu:
    """The first GPU of that machine."""
    return replace(HOPPER, bus_id=machines.discover(root).gpus[0].address)


def cuda(gpu: Gpu, kind: Kind = Kind.CUDA_MALLOC) -> FakeCuda:
    return FakeCuda(gpu, at(BASE, 4 << 20, kind))


def export(
    driver: FakeCuda, root: Path, config: WorkerConfig = CONFIG, nic_says: str = ""
) -> NicRegistration:
    return register_with_nics(
        gpu_pool(), config, make_driver=lambda: driver, nic_refuses_dma_buf=nic_says, root=root
    )


def core() -> _core.Engine:
    return _core.Engine(1, ["tcp"], "127.0.0.1", 0, "", 16, 1, 0, 0, ())


def test_host_memory_needs_no_driver(root: Path) -> None:
    def no_driver() -> FakeCuda:
        raise AssertionError("host memory is no matter of CUDA")

    pool = BlockPool.allocate(LAYOUT)
    registration = register_with_nics(pool, CONFIG, make_driver=no_driver, root=root)
    assert list(registration.ports) == [(f"mlx5_{number}:1", 100_000) for number in range(8)]
    assert [nic.device for nic in registration.left_out] == ["mlx5_8"]
    assert (registration.refused, registration.flush, registration.by_dma_buf) == ("", None, False)
    engine = core()
    with registration.added(engine, pool):
        engine.start()
    ((_, _, keys, _, refused, bounces),) = engine.access()
    engine.close()
    assert (len(keys), refused, bounces) == (2, "", False)


def test_a_gpu_is_served_by_the_nic_beside_it(root: Path, gpu: Gpu) -> None:
    before = descriptors()
    driver = cuda(gpu)
    registration = export(driver, root)
    assert list(registration.ports) == [("mlx5_0:1", 400_000)]
    assert len(registration.left_out) == 8
    assert "is SYS, farther than mlx5_0:1 (PIX)" in next(
        str(nic) for nic in registration.left_out if nic.device == "mlx5_4"
    )
    assert registration.refused == ""
    assert registration.by_dma_buf
    assert [each.offset for each in registration.exported] == [0, 64]
    assert [address for address, _ in driver.exported] == [BASE, SECOND - 64]
    fds = [fd for each in registration.exported for fd in each.fds]
    assert len(fds) == 2
    engine = core()
    with registration.added(engine, gpu_pool()):
        assert all(os.fstat(fd) for fd in fds)
        engine.start()
    ((_, _, keys, _, refused, _),) = engine.access()
    engine.close()
    assert (keys, refused.partition(",")[0]) == ([], "tcp reaches host memory")
    assert [each.fds for each in registration.exported] == [(), ()]
    del engine
    assert not opened_since(before)


def test_a_large_region_has_a_dma_buf_for_each_slice_that_a_nic_registers(root: Path, gpu: Gpu) -> None:
    slice_bytes = _core.NIC_SLICE_BYTES
    small = BASE + 3 * slice_bytes
    regions = [(BASE, 2 * slice_bytes + 4096), (small, SIZE)]
    pool = BlockPool([Region(address, size, None, None, gpu=0) for address, size in regions], LAYOUT)
    driver = FakeCuda(gpu, at(BASE, 4 * slice_bytes))
    registration = register_with_nics(pool, CONFIG, make_driver=lambda: driver, root=root)
    assert [(address, size) for address, size in driver.exported if address < small] == [
        (BASE, slice_bytes),
        (BASE + slice_bytes, slice_bytes),
        (BASE + 2 * slice_bytes, 4096),
    ]
    assert [len(each.fds) for each in registration.exported] == [3, 1]
    for each in registration.exported:
        each.close()


def test_named_ports_are_taken_as_they_are(root: Path, gpu: Gpu) -> None:
    registration = export(cuda(gpu), root, WorkerConfig(nics="mlx5_4:1"))
    assert (list(registration.ports), registration.left_out, registration.refused) == (
        [("mlx5_4:1", 100_000)],
        (),
        "",
    )
    for each in registration.exported:
        each.close()
    with pytest.raises(ConfigError, match="names mlx5_77"):
        export(cuda(gpu), root, WorkerConfig(nics="mlx5_77"))


def test_a_nic_that_takes_no_dma_buf_is_tried_with_peermem(root: Path, gpu: Gpu) -> None:
    (root / "sys/module/nvidia_peermem").mkdir(parents=True)
    registration = export(cuda(gpu), root, nic_says="mlx5_0:1 cannot register: Operation not supported")
    assert [each.decision.way for each in registration.exported] == [Way.PEERMEM] * 2
    assert not registration.by_dma_buf
    assert "Operation not supported" in str(registration.exported[0].decision)


@pytest.mark.parametrize(
    ("gpudirect", "says"),
    [
        ("", ["not dma-buf: the GPU's driver exports no", "not peermem: nvidia-peermem is not loaded", "modprobe"]),
        ("bounce", ["NICs do not reach this GPU memory", "allow dma-buf or peermem in KVLINK_GPUDIRECT"]),
    ],
)  # fmt: skip
def test_what_no_nic_reaches_is_staged(root: Path, gpu: Gpu, gpudirect: str, says: list[str]) -> None:
    before = descriptors()
    registration = export(cuda(replace(gpu, dma_buf=False)), root, WorkerConfig(gpudirect=gpudirect))
    near_its_node = [(f"mlx5_{number}:1", 200_000) for number in range(4)]
    assert (registration.exported, registration.flush, list(registration.ports)) == ((), None, near_its_node)
    assert all(part in registration.bounced for part in says), registration.bounced
    assert registration.refused == ""
    assert not opened_since(before)
    engine = core()
    engine.force_bounce("tcp", registration.bounced)
    with registration.added(engine, gpu_pool()):
        engine.start()
    ((_, _, keys, _, refused, bounces),) = engine.access()
    engine.close()
    assert (keys, bounces) == ([], False)
    assert "it cannot be staged (bounce is not allowed; add it to KVLINK_GPUDIRECT)" in refused


def test_what_may_not_be_staged_is_refused_loudly(
    root: Path, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    before = descriptors()
    registration = export(cuda(replace(gpu, dma_buf=False)), root, WorkerConfig(gpudirect="dma-buf,peermem"))
    assert (registration.exported, registration.flush, list(registration.ports)) == (
        (),
        None,
        [("mlx5_0:1", 400_000)],
    )
    for part in ("cannot be exported", "exports no dma-buf", "nvidia-peermem is not loaded"):
        assert part in registration.refused
    assert registration.refused in caplog.text
    assert registration.bounced == ""
    assert not opened_since(before)


def test_the_first_region_is_released_when_the_second_is_staged(root: Path, gpu: Gpu) -> None:
    before = descriptors()
    first, second = at(BASE, SIZE), at(SECOND, SIZE, Kind.ASYNC)
    driver = FakeCuda(gpu, first, second)
    registration = export(driver, root)
    assert len(driver.exported) == 1
    assert "cudaMallocAsync cannot be registered" in registration.bounced
    assert registration.exported == ()
    assert not opened_since(before)


def test_a_far_nic_is_used_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = machines.cloud_vm(tmp_path)
    machine.write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
    gpus = machine.discover().gpus
    registration = export(cuda(replace(HOPPER, bus_id=gpus[1].address)), tmp_path)
    assert list(registration.ports) == [("mlx5_1:1", 50_000)]
    assert len(registration.exported) == 2
    assert f"far from its NIC device=cuda:0 reason=mlx5_1:1 is PHB from GPU {gpus[1].address}" in caplog.text


def test_without_a_nic_that_reaches_the_gpu_its_bytes_are_staged(tmp_path: Path) -> None:
    gpu = replace(HOPPER, bus_id=machines.only_soft(tmp_path).discover().gpus[0].address)
    staged = export(cuda(gpu), tmp_path)
    assert [name for name, _ in staged.ports] == ["rxe0:1", "rxe1:1"]
    assert "rxe0:1 is a soft device, which cannot reach GPU memory" in staged.bounced
    refused = export(cuda(gpu), tmp_path, WorkerConfig(gpudirect="dma-buf,peermem"))
    assert (refused.ports, refused.bounced) == ([], "")
    assert "no NIC serves GPU" in refused.refused


def test_without_cuda_python_it_says_so(root: Path) -> None:
    def absent() -> FakeCuda:
        raise TransportUnavailable("cuda-python is not installed", "pip install cuda-bindings")

    registration = register_with_nics(gpu_pool(), CONFIG, make_driver=absent, root=root)
    assert registration.bounced.endswith(
        "this GPU memory: cuda-python is not installed. pip install cuda-bindings"
    )
    assert (registration.refused, len(registration.ports)) == ("", 8)
    registration = register_with_nics(
        gpu_pool(), WorkerConfig(gpudirect="dma-buf"), make_driver=absent, root=root
    )
    assert registration.refused == "cuda-python is not installed. pip install cuda-bindings"
    assert (registration.bounced, registration.ports) == ("", ())


@pytest.mark.parametrize(
    ("ordering", "offered", "flushes"),
    [
        (Ordering.NONE, True, True),
        (Ordering.NONE, False, False),
        (Ordering.OWNER, True, False),
        (Ordering.ALL_DEVICES, True, False),
    ],
)
def test_landed_bytes_are_flushed_when_the_gpu_says_so(
    root: Path, gpu: Gpu, ordering: Ordering, offered: bool, flushes: bool
) -> None:
    driver = cuda(replace(gpu, ordering=ordering, flush_from_host=offered))
    registration = export(driver, root)
    for each in registration.exported:
        each.close()
    assert (registration.flush is not None) == flushes
    if registration.flush:
        registration.flush()
    assert driver.flushed == [Ordering.OWNER] * flushes


def test_the_staging_buffer_is_exported_as_the_pool_is(root: Path, gpu: Gpu) -> None:
    """The engine is given it behind the pool's regions; without NICs that reach it, only when it always stages."""
    memory = SimpleNamespace(address=BASE + (2 << 20), bytes=1 << 20)
    driver = cuda(gpu)
    registration = register_with_nics(
        gpu_pool(), CONFIG, staging=memory, make_driver=lambda: driver, root=root
    )  # type: ignore[arg-type]
    assert [each.decision.way for each in registration.exported] == [Way.DMA_BUF] * 3
    given: list[object] = []
    engine = SimpleNamespace(
        add_foreign_region=lambda *region, **how: given.append((region[0], len(how["dmabuf_fds"]))),
        set_staging=lambda staging, always, fds, offset, _: given.append((staging, always, len(fds), offset)),
    )
    with registration.added(engine, gpu_pool(), memory):  # type: ignore[arg-type]
        assert given == [(BASE, 1), (SECOND, 1), (memory, False, 1, 0)]
    for always in (False, True):
        given.clear()
        with NicRegistration().added(engine, gpu_pool(), memory, always=always):  # type: ignore[arg-type]
            assert given == [(BASE, 0), (SECOND, 0)] + [(memory, True, 0, 0)] * always


def test_a_pool_says_where_it_is(gpu: Gpu) -> None:
    first, second = gpu_pool().placements(cuda(gpu, Kind.VMM))
    assert (first.gpu, first.allocations) == (gpu, second.allocations)
    assert str(first) == (
        f"device=cuda:0 pci={gpu.bus_id} memory='cuMemMap (expandable segments)' allocations=1 "
        f"range={BASE:#x}-{BASE + (4 << 20):#x} granularity=0"
    )
    assert BlockPool.allocate(LAYOUT).placements() == ()
    with pytest.raises(TransportUnavailable, match="CUDA knows no memory"):
        gpu_pool().placements(FakeCuda(gpu))
