# SPDX-License-Identifier: Apache-2.0
"""Decides how a range of GPU memory is exported to a NIC, and records why the better ways are not possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvlink.config.rdma_config import Way
from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect.driver import Kind

DMA_BUF_KERNEL = (5, 12)  # the first with ibv_reg_dmabuf_mr
_OPEN_MODULES = "install the driver's open kernel modules (packages nvidia-open, nvidia-driver-*-open)"


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts that decide how one range is exported."""

    num_bytes: int
    kind: Kind
    num_allocations: int
    num_devices: int
    mapped: bool
    """Whether every byte of the range is mapped."""
    rdma_capable: bool
    """Whether every allocation is capable of RDMA. VMM memory must be created with gpuDirectRDMACapable."""
    gpu_rdma: bool
    gpu_dma_buf: bool
    kernel: tuple[int, int]
    nic_refuses_dma_buf: str
    """The reason why the NIC's driver or libibverbs refuses dma-buf, or "" if it does not."""
    peermem: bool
    bar1_bytes: int | None
    """None if it is unknown or there is no limit, as on coherent GPUs."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A way that is not possible, with the reason and what would make it possible."""

    way: Way
    reason: str
    fix: str


@dataclass(frozen=True, slots=True)
class Decision:
    """The selected way, and the reasons why the better ones are not possible."""

    way: Way
    refused: tuple[Refusal, ...]

    def __str__(self) -> str:
        """Returns one sentence for a log."""
        return self.way.value + "".join(
            f"; not {each.way.value}: {each.reason} ({each.fix})" for each in self.refused
        )


def decide(facts: Facts, allowed: Sequence[Way] = tuple(Way)) -> Decision:
    """Returns the first way of `allowed` that the facts permit. Raises TransportUnavailable if there is none."""
    refused: list[Refusal] = []
    for way in allowed:
        obstacle = next(_obstacles(way, facts), None)
        if obstacle is None:
            return Decision(way, tuple(refused))
        refused.append(Refusal(way, *obstacle))
    reasons = "; ".join(f"{each.way.value}: {each.reason}" for each in refused) or "no way is allowed"
    raise TransportUnavailable(
        f"{facts.num_bytes} bytes of GPU memory cannot be exported ({reasons})",
        refused[0].fix if refused else "allow dma-buf, peermem or bounce",
    )


def _obstacles(way: Way, facts: Facts) -> Iterator[tuple[str, str]]:
    if way is not Way.BOUNCE:
        yield from _obstacles_of_memory(facts)
    if way is Way.DMA_BUF:
        yield from _obstacles_of_dma_buf(facts)
    if way is Way.PEERMEM:
        yield from _obstacles_of_peermem(facts)


def _obstacles_of_memory(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.kind not in (Kind.CUDA_MALLOC, Kind.VMM):
        yield f"{facts.kind.value} cannot be registered", "allocate the pool by cudaMalloc or cuMemCreate"
    if not facts.mapped:
        yield (
            "a part of the range is not mapped",
            "export only mapped memory, and export again after remapping",
        )
    if facts.num_devices > 1:
        yield f"the range is on {facts.num_devices} GPUs", "pass one region per GPU"
    if facts.kind is Kind.CUDA_MALLOC and facts.num_allocations > 1:
        allocations = f"{facts.num_allocations} cudaMalloc allocations"
        yield f"the range crosses {allocations}", "pass one region per allocation"
    if not facts.gpu_rdma:
        yield "this GPU does not support GPUDirect RDMA", "use a data-centre or professional GPU"
    if not facts.rdma_capable:
        yield "the memory was created without gpuDirectRDMACapable", "set that flag of CUmemAllocationProp"
    if facts.bar1_bytes is not None and facts.bar1_bytes < facts.num_bytes:
        window = f"the GPU's BAR1 window has {facts.bar1_bytes} bytes, the range {facts.num_bytes}"
        yield window, "enable Resizable BAR and Above 4G Decoding in the firmware"


def _obstacles_of_dma_buf(facts: Facts) -> Iterator[tuple[str, str]]:
    if facts.kernel < DMA_BUF_KERNEL:
        yield "kernel {}.{} is older than 5.12".format(*facts.kernel), "boot a newer kernel"
    if not facts.gpu_dma_buf:
        yield "the GPU's driver exports no dma-buf", _OPEN_MODULES
    if facts.nic_refuses_dma_buf:
        yield facts.nic_refuses_dma_buf, "update rdma-core and the NIC's driver"


def _obstacles_of_peermem(facts: Facts) -> Iterator[tuple[str, str]]:
    if not facts.peermem:
        yield "nvidia-peermem is not loaded", "sudo modprobe nvidia-peermem"
    if facts.num_allocations > 1:
        many = f"the range crosses {facts.num_allocations} allocations, which peermem is not known to follow"
        yield many, "use dma-buf, or switch expandable segments off"
