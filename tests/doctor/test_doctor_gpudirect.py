# SPDX-License-Identifier: Apache-2.0
"""The doctor on what stands between NICs and GPU memory, over made-up kernel trees."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hardware.fake_root import GPU, NIC, FakeRoot, bars, config_space

from kvlink.doctor import Verdict, gpudirect
from kvlink.doctor.verdict import Check
from kvlink.hardware.topology import PciDevice, discover, pci

PASS, WARN = Verdict.PASS, Verdict.WARN
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03"
POSSIBLE = "CONFIG_DMA_SHARED_BUFFER=y\nCONFIG_INFINIBAND_ON_DEMAND_PAGING=y"
GPU_ADDRESS, NIC_ADDRESS, SWITCH = "0000:1b:00.0", "0000:1a:00.0", ("0000:18:00.0", "0000:19:01.0")
FAST = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
WIDE = {"current_link_width": "16", "max_link_width": "16"}


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def cards(root: FakeRoot) -> tuple[PciDevice, ...]:
    addresses = (GPU_ADDRESS, NIC_ADDRESS)
    found = (pci.device(root.path, f"{pci.DEVICES}/{address}", None) for address in addresses)
    return tuple(card for card in found if card)


def silent(*command: str) -> str:
    return ""


def test_a_machine_without_a_gpu_gets_one_line(root: FakeRoot) -> None:
    (check,) = gpudirect.checks(root.path, (), (), silent)
    assert (check.verdict, check.evidence) == (PASS, "no NVIDIA GPU on the PCI bus: nothing to check")


def test_every_check_of_a_machine_with_a_gpu(root: FakeRoot) -> None:
    root.card(GPU_ADDRESS, GPU)
    machine = discover(root.path)
    names = [check.name for check in gpudirect.checks(root.path, machine.gpus, machine.nics, silent)]
    assert names == ["dma-buf", "peermem", "bar1", "iommu", "acs", "pcie links"]


@pytest.mark.parametrize(
    ("release", "driver", "config", "verdict", "fix"),
    [
        ("6.8.0-40-generic", OPEN, POSSIBLE, PASS, ""),
        ("5.12.0", OPEN, "", PASS, ""),
        ("5.11.22", OPEN, "", WARN, "boot a kernel of 5.12 or later"),
        ("4.18.0-553.el8", OPEN, "", WARN, "boot a kernel of 5.12 or later"),
        ("6.8.0", CLOSED, "", WARN, "install the driver's open kernel modules"),
        ("6.8.0", "", "", WARN, "install the driver's open kernel modules"),
        (
            "6.8.0",
            OPEN,
            "CONFIG_DMA_SHARED_BUFFER=y\n# CONFIG_INFINIBAND_ON_DEMAND_PAGING is not set",
            WARN,
            "CONFIG_INFINIBAND_ON_DEMAND_PAGING=y",
        ),
        ("6.8.0", OPEN, "# CONFIG_DMA_SHARED_BUFFER is not set", WARN, "CONFIG_DMA_SHARED_BUFFER=y"),
    ],
)
def test_dma_buf(root: FakeRoot, release: str, driver: str, config: str, verdict: Verdict, fix: str) -> None:
    root.write("proc/sys/kernel/osrelease", release)
    if driver:
        root.write("proc/driver/nvidia/version", f"{driver}\nGCC version: 12")
    if config:
        root.write(f"boot/config-{release}", config)
    check = gpudirect.dma_buf(root.path)
    assert check.verdict is verdict
    assert fix in check.fix
    assert bool(check.fix) == (verdict is WARN)


def test_the_kernel_configuration_may_be_compressed(root: FakeRoot) -> None:
    root.write("proc/sys/kernel/osrelease", "6.8.0")
    root.write("proc/driver/nvidia/version", OPEN)
    text = f"{POSSIBLE}\nCONFIG_PCI_P2PDMA=y\n# CONFIG_DMABUF_MOVE_NOTIFY is not set\n"
    root.write("proc/config.gz", gzip.compress(text.encode()))
    check = gpudirect.dma_buf(root.path)
    assert check.verdict is PASS
    assert "CONFIG_PCI_P2PDMA=y, CONFIG_DMABUF_MOVE_NOTIFY=n" in check.evidence


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sys/module/nvidia_peermem", "nvidia_peermem"),
        ("sys/module/nv_peer_mem", "nv_peer_mem"),
        ("sys/kernel/mm/memory_peers/nv_mem", "memory_peers/nv_mem"),
    ],
)
def test_peermem_stands_in_for_dma_buf(root: FakeRoot, module: str, name: str) -> None:
    root.write("proc/sys/kernel/osrelease", "5.4.0")
    check = gpudirect.peermem(root.path)
    assert (check.verdict, check.fix) == (WARN, "sudo modprobe nvidia-peermem")
    assert gpudirect.dma_buf(root.path).verdict is WARN
    root.write(f"{module}/version", "570.86.15")
    assert gpudirect.peermem(root.path) == Check("peermem", PASS, f"{name} is loaded")
    assert gpudirect.dma_buf(root.path).verdict is PASS


def test_peermem_is_not_needed_beside_dma_buf(root: FakeRoot) -> None:
    root.write("proc/sys/kernel/osrelease", "6.8.0")
    root.write("proc/driver/nvidia/version", OPEN)
    check = gpudirect.peermem(root.path)
    assert (check.verdict, check.evidence) == (PASS, "not loaded, and not needed: dma-buf comes first")


@pytest.mark.parametrize(
    ("bar1", "memory_mib", "verdict"),
    [
        (128 << 30, "81559", PASS),
        (64 << 30, "65536", PASS),
        (64 << 30, "81559", WARN),
        (256 << 20, "", WARN),
        (32 << 30, "", PASS),
        (0, "24576", WARN),
    ],
)
def test_bar1(root: FakeRoot, bar1: int, memory_mib: str, verdict: Verdict) -> None:
    sizes = (16 << 20, bar1, 32 << 20) if bar1 else (16 << 20,)
    root.card(GPU_ADDRESS, GPU, resource=bars(*sizes))

    def run(*command: str) -> str:
        assert command[0] == "nvidia-smi"
        return f"00000000:1B:00.0, {memory_mib}\n" if memory_mib else ""

    check = gpudirect.bar1(root.path, discover(root.path).gpus, run)
    assert check.verdict is verdict
    assert check.evidence.startswith(f"{GPU_ADDRESS} BAR1 ")
    assert ("Resizable BAR" in check.fix) == (verdict is WARN)


@pytest.mark.parametrize(
    ("kind", "cmdline", "unit", "verdict", "says"),
    [
        ("", "quiet", False, PASS, "off, or hidden"),
        (
            "identity",
            "quiet iommu=pt intel_iommu=on",
            True,
            PASS,
            "(kernel options: iommu=pt intel_iommu=on)",
        ),
        ("DMA-FQ", "quiet intel_iommu=on", True, WARN, f"translates for {GPU_ADDRESS} (DMA-FQ)"),
        ("DMA", "amd_iommu=on", True, WARN, f"translates for {GPU_ADDRESS} (DMA)"),
        ("", "quiet", True, WARN, "its mode is unknown"),
        ("", "iommu=pt", True, PASS, "passes GPUs and NICs through"),
    ],
)
def test_iommu(root: FakeRoot, kind: str, cmdline: str, unit: bool, verdict: Verdict, says: str) -> None:
    root.card(GPU_ADDRESS, GPU)
    root.write("proc/cmdline", cmdline)
    if unit:
        root.write("sys/class/iommu/dmar0/intel-iommu/cap", "0")
    if kind:
        root.write("sys/kernel/iommu_groups/7/type", kind)
        root.link(f"sys/bus/pci/devices/{GPU_ADDRESS}/iommu_group", "sys/kernel/iommu_groups/7")
    check = gpudirect.iommu(root.path, cards(root))
    assert check.verdict is verdict
    assert says in check.evidence
    assert ("iommu=pt" in check.fix) == (verdict is WARN)


def switch(root: FakeRoot, downstream: bytes) -> None:
    """A GPU and a NIC under one switch; its two bridges have these registers."""
    root.card(SWITCH[0], ("0x1000", "0x060400"), config=config_space(0))
    root.card(SWITCH[1], ("0x1000", "0x060400"), SWITCH[:1], config=downstream)
    root.card(GPU_ADDRESS, GPU, SWITCH)
    root.card(NIC_ADDRESS, NIC, SWITCH)


@pytest.mark.parametrize(
    ("control", "verdict"), [(None, PASS), (0, PASS), (0x01, PASS), (0x04, WARN), (0x08, WARN), (0x1D, WARN)]
)
def test_access_control_services(root: FakeRoot, control: int | None, verdict: Verdict) -> None:
    switch(root, config_space(control))
    check = gpudirect.redirection(root.path, cards(root))
    assert check.verdict is verdict
    if verdict is WARN:
        assert check.evidence.startswith(f"{SWITCH[1]} redirect")
        assert check.fix.startswith(f"sudo setpci -s {SWITCH[1]} ECAP_ACS+0x6.w=0000 ")
    else:
        assert check.evidence == "no redirection by 2 bridge(s) above GPUs and NICs"


def test_access_control_services_that_only_root_sees(root: FakeRoot) -> None:
    switch(root, config_space(0x1D, size=64))
    check = gpudirect.redirection(root.path, cards(root))
    assert (check.verdict, check.evidence) == (
        WARN,
        f"unknown: only root can read the registers of {SWITCH[1]}",
    )
    assert "lspci -vvv" in check.fix


def test_access_control_services_without_bridges(root: FakeRoot) -> None:
    root.card(GPU_ADDRESS, GPU)
    check = gpudirect.redirection(root.path, cards(root))
    assert (check.verdict, check.evidence) == (PASS, "no PCIe bridge above GPUs and NICs is visible here")


@pytest.mark.parametrize("space", [b"\xff" * 4096, b"\0" * 4096, (b"\0" * 0x100 + b"\x01\x00\x00\x10") * 15])
def test_broken_configuration_spaces_end(space: bytes) -> None:
    assert gpudirect.acs_control(space) == 0


@pytest.mark.parametrize(
    ("gpu", "nic", "slow"),
    [
        ({}, {}, ()),
        ({"current_link_speed": "2.5 GT/s PCIe"}, {}, ()),
        ({"current_link_width": "8"}, {}, (GPU_ADDRESS,)),
        ({}, {"current_link_speed": "16.0 GT/s PCIe"}, (NIC_ADDRESS,)),
        ({}, {"current_link_width": "4"}, (NIC_ADDRESS,)),
        ({"current_link_speed": "Unknown", "current_link_width": "0"}, {}, ()),
    ],
)
def test_links(root: FakeRoot, gpu: dict[str, str], nic: dict[str, str], slow: tuple[str, ...]) -> None:
    root.card(GPU_ADDRESS, GPU, **{**FAST, **WIDE, **gpu})
    root.card(NIC_ADDRESS, NIC, **{**FAST, **WIDE, **nic})
    check = gpudirect.links(root.path, discover(root.path).gpus, cards(root))
    assert check.verdict is (WARN if slow else PASS)
    assert all(f"sudo lspci -vv -s {address}" in check.fix for address in slow)
    assert ("not readable" in check.evidence) == ("Unknown" in gpu.values())
