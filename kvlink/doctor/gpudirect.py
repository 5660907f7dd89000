# SPDX-License-Identifier: Apache-2.0
"""Checks whether NICs can reach GPU memory: driver, dma-buf, peermem, BAR1, IOMMU, ACS, PCIe links."""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvlink.doctor.host import gib
from kvlink.doctor.verdict import Check, Run, Verdict, run_tool
from kvlink.hardware.gpudirect.decision import DMA_BUF_KERNEL
from kvlink.hardware.gpudirect.kernel import bar1_bytes, kernel_version, peermem_module
from kvlink.hardware.sysfs import leading_number, names, read, read_int
from kvlink.hardware.topology import PciDevice, RdmaDevice, normalize
from kvlink.hardware.topology.pci import DEVICES

_CONFIG = (
    "CONFIG_DMA_SHARED_BUFFER",
    "CONFIG_INFINIBAND_ON_DEMAND_PAGING",
    "CONFIG_PCI_P2PDMA",
    "CONFIG_DMABUF_MOVE_NOTIFY",
)
# mlx5 refuses every dma-buf without CONFIG_INFINIBAND_ON_DEMAND_PAGING (drivers/infiniband/hw/mlx5/mr.c).
_NEEDED = ("CONFIG_DMA_SHARED_BUFFER", "CONFIG_INFINIBAND_ON_DEMAND_PAGING")
_SMALL_BAR1_BYTES = 256 << 20  # the size on boards without Resizable BAR


def checks(
    root: Path, gpus: Sequence[PciDevice], nics: Sequence[RdmaDevice], run: Run = run_tool
) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown. Without a GPU there is only one."""
    if not gpus:
        yield Check("gpudirect", Verdict.PASS, "no NVIDIA GPU on the PCI bus: nothing to check")
        return
    cards = [*gpus, *(nic.pci for nic in nics if nic.pci)]
    yield dma_buf(root)
    yield peermem(root)
    yield bar1(root, gpus, run)
    yield iommu(root, cards)
    yield redirection(root, cards)
    yield links(root, gpus, cards)


def dma_buf(root: Path) -> Check:
    """Checks dma-buf, the first choice for exporting GPU memory.

    CONFIG_DMABUF_MOVE_NOTIFY is shown but not judged, because pinned imports do not need it.
    """
    kernel, driver = kernel_version(root), read(root, "proc/driver/nvidia/version").partition("\n")[0]
    config = _kernel_config(root)
    shown = [f"kernel {kernel[0]}.{kernel[1]}", driver or "no NVIDIA driver is loaded"]
    shown += [f"{name}={config[name]}" for name in _CONFIG if name in config]
    evidence = ", ".join(shown)
    fixes = []
    if kernel < DMA_BUF_KERNEL:
        fixes.append("boot a kernel of 5.12 or later")
    fixes += [f"boot a kernel with {name}=y" for name in _NEEDED if config.get(name) == "n"]
    if "Open Kernel Module" not in driver:
        fixes.append(
            "install the driver's open kernel modules (nvidia-open, nvidia-driver-*-open; Turing or later)"
        )
    if not fixes:
        return Check("dma-buf", Verdict.PASS, evidence)
    if loaded := peermem_module(root):
        return Check("dma-buf", Verdict.PASS, f"not possible here ({evidence}); {loaded} is used instead")
    return Check("dma-buf", Verdict.WARN, evidence, "; ".join(fixes))


def _kernel_config(root: Path) -> dict[str, str]:
    """Returns the kernel's values of the options above, "n" for those not set.

    Returns an empty dict if the kernel's configuration cannot be read.
    """
    release = read(root, "proc/sys/kernel/osrelease")
    text = read(root, f"boot/config-{release}") or read(root, f"lib/modules/{release}/config")
    if not text:
        try:
            text = gzip.decompress((root / "proc/config.gz").read_bytes()).decode()
        except (OSError, EOFError):
            return {}
    return {
        name: match[1] if (match := re.search(rf"^{name}=(\S+)", text, re.MULTILINE)) else "n"
        for name in _CONFIG
    }


def peermem(root: Path) -> Check:
    """Checks peermem, the second choice. It needs MLNX_OFED, DOCA or a distribution's kernel with peer memory."""
    if loaded := peermem_module(root):
        return Check("peermem", Verdict.PASS, f"{loaded} is loaded")
    if dma_buf(root).verdict is Verdict.PASS:
        return Check("peermem", Verdict.PASS, "not loaded, and not needed: dma-buf comes first")
    return Check("peermem", Verdict.WARN, "nvidia-peermem is not loaded", "sudo modprobe nvidia-peermem")


def bar1(root: Path, gpus: Sequence[PciDevice], run: Run) -> Check:
    """Checks BAR1, the window through which a NIC reaches GPU memory. A pool larger than it cannot be registered."""
    query = run("nvidia-smi", "--query-gpu=pci.bus_id,memory.total", "--format=csv,noheader,nounits")
    rows = (line.split(",") for line in query.splitlines())
    memory = {
        normalize(row[0]): int(row[1]) << 20 for row in rows if len(row) == 2 and row[1].strip().isdigit()
    }
    small, evidence = [], []
    for gpu in gpus:
        window, total = bar1_bytes(root, gpu.address), memory.get(gpu.address)
        size = "not readable" if window is None else gib(window)
        evidence.append(f"{gpu.address} BAR1 {size} of {gib(total) if total else 'unknown'} memory")
        if window is None or window < (total or _SMALL_BAR1_BYTES + 1):
            small.append(gpu.address)
    if not small:
        return Check("bar1", Verdict.PASS, "; ".join(evidence))
    fix = "enable Above 4G Decoding and Resizable BAR in the firmware (a VM: the hypervisor's MMIO window)"
    return Check("bar1", Verdict.WARN, "; ".join(evidence), fix)


def iommu(root: Path, cards: Sequence[PciDevice]) -> Check:
    """Checks the IOMMU. A translating one sends traffic between cards through the CPU."""
    options = [
        word
        for word in read(root, "proc/cmdline").split()
        if re.match(r"(intel_|amd_|arm-smmu.*)?iommu[=.]", word)
    ]
    modes = {card.address: read(root, f"{DEVICES}/{card.address}/iommu_group/type") for card in cards}
    shown = f" (kernel options: {' '.join(options)})" if options else ""
    if not names(root, "sys/class/iommu") and not any(modes.values()):
        return Check("iommu", Verdict.PASS, f"off, or hidden from this machine{shown}")
    translating = [f"{address} ({mode})" for address, mode in modes.items() if mode.startswith("DMA")]
    if translating:
        fix = "add iommu=pt to the kernel's command line and reboot"
        return Check("iommu", Verdict.WARN, f"translates for {', '.join(translating)}{shown}", fix)
    if all(mode == "identity" for mode in modes.values()) or "iommu=pt" in options:
        return Check("iommu", Verdict.PASS, f"on, passes GPUs and NICs through{shown}")
    fix = "sudo dmesg | grep -i 'iommu: default domain type'; iommu=pt makes it pass through"
    return Check("iommu", Verdict.WARN, f"on, its mode is unknown{shown}", fix)


def links(root: Path, gpus: Sequence[PciDevice], cards: Sequence[PciDevice]) -> Check:
    """Finds cards that trained to fewer lanes or a lower speed than they can. GPUs lower their speed when idle."""
    idle = {gpu.address for gpu in gpus}
    evidence, slow = [], []
    for card in cards:
        at = f"{DEVICES}/{card.address}"
        lanes, most_lanes = (read_int(root, f"{at}/{name}_link_width") or 0 for name in ("current", "max"))
        speed, top_speed = (
            leading_number(read(root, f"{at}/{name}_link_speed")) for name in ("current", "max")
        )
        if not lanes or not speed:
            evidence.append(f"{card.address} link not readable")
            continue
        evidence.append(f"{card.address} x{lanes} of x{most_lanes}, {speed:g} of {top_speed:g} GT/s")
        if lanes < most_lanes or (speed < top_speed and card.address not in idle):
            slow.append(card.address)
    if not slow:
        return Check("pcie links", Verdict.PASS, "; ".join(evidence))
    fix = "; ".join(f"sudo lspci -vv -s {address} | grep LnkSta" for address in slow)
    return Check(
        "pcie links", Verdict.WARN, "; ".join(evidence), f"{fix}; then check slot, riser and firmware"
    )


# The source is PCI Express Base Specification, 7.7.11: extended capability 0x000D, control register at offset 6.
_FIRST_EXTENDED = 0x100
_ACS = 0x000D
_CONTROL = 6
_REDIRECTS = 0b11100  # request redirect, completion redirect, upstream forwarding


def redirection(root: Path, cards: Sequence[PciDevice]) -> Check:
    """Checks every bridge above the GPUs and NICs for redirection."""
    bridges = list(dict.fromkeys(bridge for card in cards for bridge in card.path[1:-1]))
    if not bridges:
        return Check("acs", Verdict.PASS, "no PCIe bridge above GPUs and NICs is visible here")
    found = {bridge: acs_control(_config(root, bridge)) for bridge in bridges}
    redirecting = [bridge for bridge, control in found.items() if control and control & _REDIRECTS]
    if redirecting:
        fix = "; ".join(f"sudo setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in redirecting)
        evidence = f"{', '.join(redirecting)} redirect traffic between cards through the CPU"
        return Check("acs", Verdict.WARN, evidence, f"{fix} (after each boot; not where VMs need isolation)")
    unknown = [bridge for bridge, control in found.items() if control is None]
    if unknown:
        evidence = f"unknown: only root can read the registers of {', '.join(unknown)}"
        return Check("acs", Verdict.WARN, evidence, "sudo kvlink doctor, or: sudo lspci -vvv | grep ACSCtl")
    return Check("acs", Verdict.PASS, f"no redirection by {len(bridges)} bridge(s) above GPUs and NICs")


def _config(root: Path, address: str) -> bytes:
    try:
        return (root / DEVICES / address / "config").read_bytes()
    except OSError:
        return b""


def acs_control(config: bytes) -> int | None:
    """Returns the ACS control register of a configuration space; 0 if there is none, None if it was truncated."""
    if len(config) < _FIRST_EXTENDED + 4:
        return None
    at, seen = _FIRST_EXTENDED, set[int]()
    while _FIRST_EXTENDED <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            (control,) = struct.unpack_from("<H", config, at + _CONTROL)
            return int(control)
        at = header >> 20
    return 0
