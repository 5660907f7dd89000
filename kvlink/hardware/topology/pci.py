# SPDX-License-Identifier: Apache-2.0
"""PCI devices and how far two of them are apart.

What sysfs does not show, this does not know: NVLink and C2C between GPUs and CPUs, peer-to-peer links inside
a switch's firmware, and in a virtual machine whatever the hypervisor flattened.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kvlink.hardware.sysfs import names, numbered, read, read_int

DEVICES = "sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = 0x10DE
_DISPLAY_CLASSES = (0x0300, 0x0302)
# A switch is two bridges to the kernel: the upstream port, then one downstream port a device.
_BRIDGES_A_SWITCH = 2
# Lanes are 32 at most; the kernel says 63 or 255 where a hypervisor left the register empty.
_MOST_LANES = 32


class Distance(IntEnum):
    """The kind of path between two PCI devices, nearest first, by NCCL's names."""

    LOC = 0
    """The same card."""
    PIX = 1
    """Through one PCIe switch."""
    PXB = 2
    """Through several switches, not through the CPU."""
    PHB = 3
    """Through the host bridges of one NUMA node. `nvidia-smi topo` splits this into PHB and NODE."""
    SYS = 4
    """Across NUMA nodes."""
    DIS = 5
    """One of the two is no PCI device: a soft NIC moves bytes by the CPU."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function of a card."""

    address: str
    """domain:bus:device.function, as in 0000:1b:00.0."""
    path: tuple[str, ...]
    """Host bridge, every bridge on the way, and the device's own address."""
    vendor_id: int
    device_id: int
    class_id: int
    """Class and subclass: 0x0302 is a 3D controller."""
    numa_node: int | None
    """None: the kernel does not know, and the machine has several."""
    link_gt_per_s: float
    """Transfers per second and lane of the link as it is now; 0: unknown."""
    link_lanes: int
    physical_function: str = ""
    """Address of the card's own function when this is a virtual one (SR-IOV)."""
    virtual_functions: tuple[str, ...] = ()

    @property
    def card(self) -> str:
        """The address without the function: what sits in one slot."""
        return self.address.rpartition(".")[0]

    @property
    def link_gbps(self) -> float:
        """Gb/s of the slot after line coding, each way; 0: unknown. Packets take some 10% more."""
        coding = 0.8 if self.link_gt_per_s <= 5 else 128 / 130
        return self.link_gt_per_s * self.link_lanes * coding


def normalize(address: str) -> str:
    """CUDA and nvidia-smi write 00000000:1B:00.0 for the kernel's 0000:1b:00.0."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def device(root: Path, at: str, only_node: int | None) -> PciDevice | None:
    """The device that folder or link `at` is or lies in; None when it is no PCI device.

    `only_node` is the machine's node when it has no other: then an unknown node is that one.
    """
    resolved = Path(os.path.realpath(root / at))
    path = tuple(part for part in resolved.parts if _ADDRESS.fullmatch(part) or _HOST_BRIDGE.fullmatch(part))
    if not path or not _ADDRESS.fullmatch(path[-1]):
        return None
    at = f"{DEVICES}/{path[-1]}"
    node, lanes = read_int(root, f"{at}/numa_node"), read_int(root, f"{at}/current_link_width") or 0
    return PciDevice(
        address=path[-1],
        path=path,
        vendor_id=read_int(root, f"{at}/vendor") or 0,
        device_id=read_int(root, f"{at}/device") or 0,
        class_id=(read_int(root, f"{at}/class") or 0) >> 8,
        numa_node=only_node if node is None or node < 0 else node,
        link_gt_per_s=_leading_number(read(root, f"{at}/current_link_speed")),
        link_lanes=lanes if lanes <= _MOST_LANES else 0,
        physical_function=_target(root, f"{at}/physfn"),
        virtual_functions=tuple(
            _target(root, f"{at}/virtfn{number}") for number in numbered(root, at, "virtfn")
        ),
    )


def gpus(root: Path, only_node: int | None) -> tuple[PciDevice, ...]:
    """NVIDIA's graphics and 3D controllers, by address as CUDA_DEVICE_ORDER=PCI_BUS_ID numbers them."""
    found = []
    for address in sorted(names(root, DEVICES)):
        at = f"{DEVICES}/{address}"
        class_id = (read_int(root, f"{at}/class") or 0) >> 8
        if read_int(root, f"{at}/vendor") == _NVIDIA and class_id in _DISPLAY_CLASSES:
            found.append(device(root, at, only_node))
    return tuple(gpu for gpu in found if gpu)


def distance(a: PciDevice | None, b: PciDevice | None) -> Distance:
    """The kind of path between two devices; None stands for a device without a PCI address."""
    if a is None or b is None:
        return Distance.DIS
    if a.card == b.card:
        return Distance.LOC
    shared = _num_shared(a.path, b.path)
    if shared > 1:  # a bridge, not the host bridge alone
        further = sum((len(path) - shared - 1) // _BRIDGES_A_SWITCH for path in (a.path, b.path))
        return Distance.PXB if further else Distance.PIX
    if a.numa_node is None or b.numa_node is None:
        return Distance.PHB if shared else Distance.SYS
    return Distance.PHB if a.numa_node == b.numa_node else Distance.SYS


def distance_to_node(device: PciDevice | None, node: int | None) -> Distance:
    """The kind of path between a device and the memory of a NUMA node (None: unknown)."""
    if device is None:
        return Distance.DIS
    return Distance.PHB if node is not None and device.numa_node == node else Distance.SYS


def _num_shared(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other))
    )


def _target(root: Path, at: str) -> str:
    return Path(os.path.realpath(root / at)).name if (root / at).is_symlink() else ""


def _leading_number(text: str) -> float:
    """32.0 of "32.0 GT/s PCIe"; 0 of "Unknown"."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match[0]) if match else 0.0
