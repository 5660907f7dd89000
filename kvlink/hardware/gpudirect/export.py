# SPDX-License-Identifier: Apache-2.0
"""Collects the facts about a range, decides, and exports the dma-buf. It calls CUDA only through a Driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvlink.config.rdma_config import Way
from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect.decision import Decision, Facts, decide
from kvlink.hardware.gpudirect.driver import Allocation, Driver, Gpu, Ordering
from kvlink.hardware.gpudirect.kernel import bar1_bytes, kernel_version, peermem_module

_log = logging.getLogger("kvlink.registration")


def allocations(driver: Driver, address: int, num_bytes: int) -> tuple[tuple[Allocation, ...], bool]:
    """Returns the allocations behind a range by ascending address, and whether they cover it without a hole."""
    found: list[Allocation] = []
    cursor = address
    while cursor < address + num_bytes:
        here = driver.allocation(cursor)
        if here is None or here.base + here.num_bytes <= cursor:
            return tuple(found), False
        found.append(here)
        cursor = here.base + here.num_bytes
    return tuple(found), True


def inspect(
    driver: Driver, address: int, num_bytes: int, nic_refuses_dma_buf: str = "", root: Path = Path("/")
) -> tuple[Facts, Gpu, tuple[Allocation, ...]]:
    """Collects the facts about a range. Raises TransportUnavailable for addresses that CUDA does not know."""
    behind, mapped = allocations(driver, address, num_bytes)
    if not behind:
        raise TransportUnavailable(
            f"CUDA knows no memory at {address:#x}", "pass a CUDA tensor whose memory is still allocated"
        )
    gpu = driver.gpu(behind[0].device)
    facts = Facts(
        num_bytes=num_bytes,
        kind=behind[0].kind,
        num_allocations=len(behind),
        num_devices=len({each.device for each in behind}),
        mapped=mapped,
        rdma_capable=all(each.rdma_capable for each in behind),
        gpu_rdma=gpu.rdma,
        gpu_dma_buf=gpu.dma_buf,
        kernel=kernel_version(root),
        nic_refuses_dma_buf=nic_refuses_dma_buf,
        peermem=bool(peermem_module(root)),
        bar1_bytes=None if gpu.coherent else bar1_bytes(root, gpu.bus_id),
    )
    return facts, gpu, behind


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a range of GPU memory: its device, and the allocations behind it by ascending address."""

    gpu: Gpu
    allocations: tuple[Allocation, ...]

    def __str__(self) -> str:
        """Returns the place as key=value pairs for a log."""
        kinds = ",".join(dict.fromkeys(each.kind.value for each in self.allocations))
        first, last = self.allocations[0], self.allocations[-1]
        return (
            f"device=cuda:{self.gpu.ordinal} pci={self.gpu.bus_id} memory={kinds!r} "
            f"allocations={len(self.allocations)} range={first.base:#x}-{last.base + last.num_bytes:#x} "
            f"granularity={first.granularity}"
        )


def placed(driver: Driver, address: int, num_bytes: int) -> Placement:
    """Returns the place of a range. Raises TransportUnavailable for addresses that CUDA does not know."""
    _, gpu, behind = inspect(driver, address, num_bytes)
    return Placement(gpu, behind)


class ExportedMemory:
    """A range that `export` prepared. Register it in the way that `decision.way` names, then close this object.

    For dma-buf call ibv_reg_dmabuf_mr(pd, `offset`, bytes of the slice, address, fd, …) for each slice of the range
    with its fd in `fds`, and for peermem ibv_reg_mr on the device address. `fds` is empty unless the way is dma-buf.
    After the registration the kernel has its own references. `pcie_fds` is the same memory for NICs that reach it
    through a PCIe function of their own beside the GPU; it is empty unless a coherent GPU exports it.
    """

    def __init__(
        self,
        driver: Driver,
        gpu: Gpu,
        decision: Decision,
        fds: Sequence[int],
        offset: int,
        pcie_fds: Sequence[int] = (),
    ) -> None:
        self.decision = decision
        self.gpu = gpu
        self.fds = tuple(fds)
        self.pcie_fds = tuple(pcie_fds)
        self.offset = offset
        self._driver = driver

    def __enter__(self) -> ExportedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptors. Idempotent."""
        fds, self.fds, self.pcie_fds = self.fds + self.pcie_fds, (), ()
        for fd in fds:
            os.close(fd)

    def needs_flush(self, scope: Ordering = Ordering.OWNER) -> bool:
        """Returns whether completed writes need a flush to be visible to `scope`.

        It is False if the GPU orders the writes itself or the writes do not go to the GPU. It is also False for GPUs
        without a flush, where only work that is launched later sees the writes.
        """
        return self.decision.way is not Way.BOUNCE and self.gpu.ordering < scope and self.gpu.flush_from_host

    def flush_writes(self, scope: Ordering = Ordering.OWNER) -> bool:
        """Makes received bytes visible to running kernels. Call it once per batch, after its completions.

        Returns False if no flush is needed, see `needs_flush`.
        """
        if not self.needs_flush(scope):
            return False
        self._driver.flush(self.gpu.ordinal, scope)
        return True


def export(
    driver: Driver,
    address: int,
    num_bytes: int,
    *,
    allowed: Sequence[Way] = tuple(Way),
    nic_refuses_dma_buf: str = "",
    slice_bytes: int = 0,
    root: Path = Path("/"),
) -> ExportedMemory:
    """Prepares [address, address + num_bytes) for a NIC. Export again when the physical memory behind it changes.

    With `slice_bytes`, a multiple of the page size, every slice of the range has a dma-buf of its own: a NIC's driver
    maps the whole dma-buf for each registration. Raises TransportUnavailable if no allowed way works.
    """
    facts, gpu, behind = inspect(driver, address, num_bytes, nic_refuses_dma_buf, root)
    decision = decide(facts, allowed)
    if decision.way is not Way.BOUNCE:
        _sync_memops(driver, behind)
    if decision.way is not Way.DMA_BUF:
        return ExportedMemory(driver, gpu, decision, (), 0)
    slices = [
        whole_pages(at, min(slice_bytes or num_bytes, address + num_bytes - at))
        for at in range(address, address + num_bytes, slice_bytes or num_bytes)
    ]
    fds = _export_all(driver, gpu, slices)
    pcie_fds: list[int] = []
    if gpu.coherent:  # the CPU is on the way of the others, which its own link to the GPU makes short
        try:
            pcie_fds = _export_all(driver, gpu, slices, pcie=True)
        except TransportUnavailable as error:
            _log.debug("no PCIe mapping for NICs beside the GPU device=cuda:%d error=%s", gpu.ordinal, error)
    return ExportedMemory(driver, gpu, decision, fds, address - slices[0][0], pcie_fds)


def _export_all(
    driver: Driver, gpu: Gpu, slices: Sequence[tuple[int, int]], *, pcie: bool = False
) -> list[int]:
    """Exports all slices or, with an exception, none."""
    fds: list[int] = []
    with ExitStack() as unless_all:
        for base, length in slices:
            fds.append(driver.export(gpu.ordinal, base, length, pcie=pcie))
            unless_all.callback(os.close, fds[-1])
        unless_all.pop_all()
    return fds


def _sync_memops(driver: Driver, behind: Sequence[Allocation]) -> None:
    """Makes CUDA's synchronous copies synchronous for NICs too. Drivers before 12.1 refuse it for VMM memory.

    A refusal does not make the memory unusable: offers wait for an event behind the last write to their blocks.
    """
    try:
        for allocation in behind:
            driver.sync_memops(allocation)
    except TransportUnavailable as error:
        _log.warning(
            "CUDA refuses SYNC_MEMOPS: offer blocks only behind an event, as offer(after=) does error=%s",
            error,
        )


def whole_pages(
    address: int, num_bytes: int, page_bytes: int = os.sysconf("SC_PAGE_SIZE")
) -> tuple[int, int]:
    """Returns (address, bytes) of the smallest run of whole host pages around a range. CUDA exports whole pages."""
    base = address & -page_bytes
    return base, (address + num_bytes + page_bytes - 1 & -page_bytes) - base
