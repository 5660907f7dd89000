# SPDX-License-Identifier: Apache-2.0
"""GPU memory is exported: the decision over every combination of facts, and the calls that follow from it."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from descriptors import descriptors, opened_since
from hardware.fake_cuda import HOPPER, FakeCuda, at
from hardware.fake_root import GPU, FakeRoot, bars
from hypothesis import given
from hypothesis import strategies as st

from kvlink.config.nic_options import Way, parse_ways
from kvlink.errors import ConfigError, TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver, Decision, Facts, Kind, Ordering, decide, export, inspect
from kvlink.hardware.gpudirect.export import whole_pages

MIB = 1 << 20
GOOD = Facts(
    num_bytes=64 * MIB,
    kind=Kind.CUDA_MALLOC,
    num_allocations=1,
    num_devices=1,
    mapped=True,
    rdma_capable=True,
    gpu_rdma=True,
    gpu_dma_buf=True,
    kernel=(6, 8),
    nic_refuses_dma_buf="",
    peermem=True,
    bar1_bytes=128 << 30,
)


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    machine = FakeRoot(tmp_path)
    machine.write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
    machine.card(HOPPER.bus_id, GPU, resource=bars(16 * MIB, 128 << 30, 32 * MIB))
    return machine


def test_the_best_way_comes_first() -> None:
    assert decide(GOOD) == Decision(Way.DMA_BUF, ())


@pytest.mark.parametrize(
    ("change", "way", "reasons"),
    [
        ({"kernel": (5, 11)}, Way.PEERMEM, ["kernel 5.11 is older than 5.12"]),
        ({"kernel": (4, 18)}, Way.PEERMEM, ["kernel 4.18 is older than 5.12"]),
        ({"gpu_dma_buf": False}, Way.PEERMEM, ["the GPU's driver exports no dma-buf"]),
        ({"nic_refuses_dma_buf": "irdma takes none"}, Way.PEERMEM, ["irdma takes none"]),
        (
            {"gpu_dma_buf": False, "peermem": False},
            Way.BOUNCE,
            ["the GPU's driver exports no dma-buf", "nvidia-peermem is not loaded"],
        ),
        ({"kind": Kind.VMM, "num_allocations": 32}, Way.DMA_BUF, []),
        (
            {"kind": Kind.VMM, "num_allocations": 32, "gpu_dma_buf": False},
            Way.BOUNCE,
            ["the GPU's driver exports no dma-buf", "the range crosses 32 allocations"],
        ),
        ({"kind": Kind.VMM, "gpu_dma_buf": False}, Way.PEERMEM, ["the GPU's driver exports no dma-buf"]),
        ({"num_allocations": 2}, Way.BOUNCE, ["the range crosses 2 cudaMalloc allocations"] * 2),
        ({"num_devices": 2}, Way.BOUNCE, ["the range is on 2 GPUs"] * 2),
        ({"mapped": False}, Way.BOUNCE, ["a part of the range is not mapped"] * 2),
        ({"gpu_rdma": False}, Way.BOUNCE, ["this GPU does not support GPUDirect RDMA"] * 2),
        ({"rdma_capable": False}, Way.BOUNCE, ["the memory was created without gpuDirectRDMACapable"] * 2),
        ({"kind": Kind.MANAGED}, Way.BOUNCE, ["cudaMallocManaged cannot be registered"] * 2),
        ({"kind": Kind.ASYNC}, Way.BOUNCE, ["cudaMallocAsync cannot be registered"] * 2),
        ({"kind": Kind.HOST}, Way.BOUNCE, ["host memory cannot be registered"] * 2),
        ({"bar1_bytes": 256 * MIB, "num_bytes": 257 * MIB}, Way.BOUNCE, ["the GPU's BAR1 window has"] * 2),
        ({"bar1_bytes": 256 * MIB, "num_bytes": 256 * MIB}, Way.DMA_BUF, []),
        ({"bar1_bytes": None}, Way.DMA_BUF, []),
    ],
)
def test_one_obstacle_at_a_time(change: dict[str, object], way: Way, reasons: list[str]) -> None:
    decision = decide(replace(GOOD, **change))  # type: ignore[arg-type]
    assert decision.way is way
    assert [each.way for each in decision.refused] == list(Way)[: len(reasons)]
    for refusal, reason in zip(decision.refused, reasons, strict=True):
        assert refusal.reason.startswith(reason)
        assert refusal.fix


def every_fact() -> list[Facts]:
    booleans = itertools.product((False, True), repeat=5)
    rest = list(itertools.product(Kind, (1, 2), (1, 2), ((5, 11), (5, 12)), ("", "no"), (None, 1, 1 << 40)))
    return [
        Facts(MIB, kind, allocations, devices, mapped, capable, rdma, dma_buf, kernel, nic, peermem, bar1)
        for mapped, capable, rdma, dma_buf, peermem in booleans
        for kind, allocations, devices, kernel, nic, bar1 in rest
    ]


def slow_decision(f: Facts) -> Way:
    """The same table, written the other way round: what each way needs."""
    reachable = f.mapped and f.rdma_capable and f.gpu_rdma and f.num_devices == 1
    window = f.bar1_bytes is None or f.bar1_bytes >= f.num_bytes
    one = f.kind is Kind.CUDA_MALLOC and f.num_allocations == 1
    if reachable and window and (one or f.kind is Kind.VMM):
        if f.kernel >= (5, 12) and f.gpu_dma_buf and not f.nic_refuses_dma_buf:
            return Way.DMA_BUF
        if f.peermem and f.num_allocations == 1:
            return Way.PEERMEM
    return Way.BOUNCE


def test_every_combination_of_facts() -> None:
    facts = every_fact()
    assert len(facts) == 32 * 5 * 2 * 2 * 2 * 2 * 3
    ways = [decide(each).way for each in facts]
    assert ways == [slow_decision(each) for each in facts]
    assert set(ways) == set(Way)


def test_what_the_operator_forbids_is_not_taken() -> None:
    assert decide(GOOD, (Way.PEERMEM, Way.BOUNCE)).way is Way.PEERMEM
    assert decide(GOOD, (Way.BOUNCE, Way.DMA_BUF)).way is Way.BOUNCE
    with pytest.raises(
        TransportUnavailable, match=r"cannot be exported \(peermem: nvidia-peermem is not"
    ) as caught:
        decide(replace(GOOD, peermem=False), (Way.PEERMEM,))
    assert caught.value.fix == "sudo modprobe nvidia-peermem"
    with pytest.raises(TransportUnavailable, match="no way is allowed"):
        decide(GOOD, ())


def test_a_decision_says_why_in_one_sentence() -> None:
    text = str(decide(replace(GOOD, gpu_dma_buf=False)))
    assert text.startswith(
        "peermem; not dma-buf: the GPU's driver exports no dma-buf (install the driver's open"
    )


def test_the_option() -> None:
    assert parse_ways("") == tuple(Way)
    assert parse_ways("bounce, dma-buf,bounce") == (Way.BOUNCE, Way.DMA_BUF)
    with pytest.raises(
        ConfigError, match="KVLINK_GPUDIRECT='nvlink' must list some of dma-buf, peermem, bounce"
    ):
        parse_ways("nvlink")


@given(st.integers(0, 1 << 48), st.integers(1, 1 << 32), st.sampled_from((4096, 65536)))
def test_pages_around_a_range(address: int, num_bytes: int, page: int) -> None:
    base, length = whole_pages(address, num_bytes, page)
    assert base % page == length % page == 0
    assert base <= address < base + page
    assert base + length - page < address + num_bytes <= base + length


def test_facts_of_a_tensor_inside_an_allocation(root: FakeRoot) -> None:
    cuda = FakeCuda(HOPPER, at(0x7F0000000000, 64 * MIB))
    facts, gpu, behind = inspect(cuda, 0x7F0000000200, MIB, "", root.path)
    assert (gpu, behind) == (HOPPER, cuda.allocations)
    assert facts == replace(GOOD, num_bytes=MIB, peermem=False)


def test_facts_of_expandable_segments(root: FakeRoot) -> None:
    segments = [at(0x1000000 + index * 2 * MIB, 2 * MIB, Kind.VMM, capable=index != 2) for index in range(4)]
    cuda = FakeCuda(HOPPER, *segments)
    whole, _, _ = inspect(cuda, 0x1000000, 8 * MIB, "", root.path)
    assert (whole.num_allocations, whole.mapped, whole.rdma_capable) == (4, True, False)
    two, _, _ = inspect(cuda, 0x1000000 + MIB, 2 * MIB, "", root.path)
    assert (two.num_allocations, two.mapped, two.rdma_capable) == (2, True, True)
    beyond, _, _ = inspect(cuda, 0x1000000, 9 * MIB, "", root.path)
    assert not beyond.mapped


def test_coherent_gpus_are_not_limited_by_bar1(root: FakeRoot) -> None:
    memory = at(0x1000000, MIB)
    assert inspect(FakeCuda(HOPPER, memory), 0x1000000, MIB, "", root.path)[0].bar1_bytes == 128 << 30
    coherent = FakeCuda(replace(HOPPER, coherent=True), memory)
    assert inspect(coherent, 0x1000000, MIB, "", root.path)[0].bar1_bytes is None


def test_memory_that_cuda_does_not_know(root: FakeRoot) -> None:
    with pytest.raises(TransportUnavailable, match="CUDA knows no memory at 0x1000"):
        export(FakeCuda(HOPPER), 0x1000, 1, root=root.path)


def test_exporting_by_dma_buf(root: FakeRoot) -> None:
    cuda = FakeCuda(HOPPER, at(0x1000000, 2 * MIB, Kind.VMM), at(0x1000000 + 2 * MIB, 2 * MIB, Kind.VMM))
    exported = export(cuda, 0x1000000 + 512, 3 * MIB, root=root.path)
    assert exported.decision.way is Way.DMA_BUF
    assert cuda.exported == [(0x1000000, 3 * MIB + 4096)]
    assert cuda.synced == [each.base for each in cuda.allocations]
    assert exported.offset == 512
    (fd,) = exported.fds
    os.fstat(fd)
    exported.close()
    exported.close()
    assert exported.fds == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_every_slice_has_a_dma_buf_of_whole_pages(root: FakeRoot) -> None:
    base = 0x100000000
    cuda = FakeCuda(HOPPER, at(base, 8 * MIB))
    with export(cuda, base + 512, 5 * MIB, slice_bytes=2 * MIB, root=root.path) as exported:
        assert (len(set(exported.fds)), exported.offset) == (3, 512)
    assert cuda.exported == [
        (base, 2 * MIB + 4096),
        (base + 2 * MIB, 2 * MIB + 4096),
        (base + 4 * MIB, MIB + 4096),
    ]


@pytest.mark.parametrize("known", [True, False])
def test_coherent_gpus_export_their_pcie_mapping_too(root: FakeRoot, known: bool) -> None:
    memory = at(0x1000000, 4 * MIB)
    with export(FakeCuda(HOPPER, memory), 0x1000000, 4 * MIB, root=root.path) as plain:
        assert plain.pcie_fds == ()
    cuda = FakeCuda(replace(HOPPER, coherent=True), memory)
    cuda.exports_pcie = known
    before = descriptors()
    with export(cuda, 0x1000000, 4 * MIB, slice_bytes=2 * MIB, root=root.path) as exported:
        assert (len(exported.fds), len(exported.pcie_fds)) == (2, 2 if known else 0)
        assert cuda.exported_pcie == (cuda.exported if known else [])
    assert not opened_since(before)


def test_no_descriptor_is_left_when_one_slice_cannot_be_exported(root: FakeRoot) -> None:
    cuda = FakeCuda(HOPPER, at(0x1000000, 8 * MIB))
    cuda.exports_left = 2
    before = descriptors()
    with pytest.raises(TransportUnavailable, match="cuMemGetHandleForAddressRange"):
        export(cuda, 0x1000000, 8 * MIB, slice_bytes=2 * MIB, root=root.path)
    assert len(cuda.exported) == 2
    assert not opened_since(before)


def test_exporting_by_peermem_exports_nothing(root: FakeRoot) -> None:
    root.write("sys/module/nvidia_peermem/version", "570")
    cuda = FakeCuda(replace(HOPPER, dma_buf=False), at(0x1000000, MIB))
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        assert (exported.decision.way, exported.fds, exported.offset) == (Way.PEERMEM, (), 0)
    assert (cuda.exported, cuda.synced) == ([], [0x1000000])


def test_the_bounce_buffer_touches_nothing(root: FakeRoot) -> None:
    cuda = FakeCuda(replace(HOPPER, rdma=False, ordering=Ordering.NONE), at(0x1000000, MIB))
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        assert (exported.decision.way, exported.fds) == (Way.BOUNCE, ())
        assert not exported.flush_writes()
    assert (cuda.exported, cuda.synced, cuda.flushed) == ([], [], [])


def test_memory_is_exported_even_if_cuda_refuses_synchronous_copies(
    root: FakeRoot, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(HOPPER, at(0x1000000, MIB))
    cuda.refuses_sync = True
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        assert exported.decision.way is Way.DMA_BUF
        assert len(exported.fds) == 1
    assert "CUDA refuses SYNC_MEMOPS" in caplog.text
    assert "cuPointerSetAttribute: CUDA_ERROR_INVALID_VALUE" in caplog.text


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("ordering", Ordering)
@pytest.mark.parametrize("scope", [Ordering.OWNER, Ordering.ALL_DEVICES])
def test_writes_are_flushed_only_where_the_gpu_does_not_order_them(
    root: FakeRoot, offered: bool, ordering: Ordering, scope: Ordering
) -> None:
    cuda = FakeCuda(replace(HOPPER, ordering=ordering, flush_from_host=offered), at(0x1000000, MIB))
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        needed = offered and ordering < scope
        assert exported.flush_writes(scope) is needed
    assert cuda.flushed == ([scope] if needed else [])


def test_the_real_driver_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransportUnavailable, match="cuda-python is not installed") as caught:
        CudaDriver()
    assert caught.value.fix.startswith("pip install 'kvlink[cuda]'")
