# SPDX-License-Identifier: Apache-2.0
"""Reads PCI devices and computes the distance between two of them.

sysfs does not show, and this module does not know, NVLink and C2C between GPUs and CPUs, peer-to-peer links inside the
firmware of a switch, and in a virtual machine the levels that the hypervisor hides.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from kvlink.hardware.sysfs import leading_number, names, numbered, read, read_int

DEVICES = "sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_NVIDIA = 0x10DE
# GH200 (github.com/NVIDIA/gpu-admin-tools, gpu/devid_names.py), GB200 and GB300. NVLink-C2C joins them to the CPU.
_COHERENT = frozenset({0x2342, 0x2343, 0x2345, 0x2348, 0x2941, 0x31C2})
_DISPLAY_CLASSES = (0x0300, 0x0302)
# The kernel shows a switch as two bridges on a path: the upstream port, then the downstream port of the device.
_BRIDGES_PER_SWITCH = 2
# A link has at most 32 lanes. The kernel reports 63 or 255 if a hypervisor left the register empty.
_MOST_LANES = 32


class Distance(IntEnum):
    """The kind of path between two PCI devices, nearest first, with the names of NCCL."""

    LOC = 0
    """Both are on the same card."""
    PIX = 1
    """The path goes through one PCIe switch."""
    PXB = 2
    """The path goes through several switches but not through the CPU."""
    PHB = 3
    """The path goes through one host bridge, which belongs to the CPU."""
    NODE = 4
    """The path goes through several host bridges of one NUMA node."""
    SYS = 5
    """The path crosses NUMA nodes."""
    DIS = 6
    """One of the two is not a PCI device. For example, a soft NIC moves bytes with the CPU."""


@dataclass(frozen=True, slots=True)
class PciDevice:
    """One function of a card."""

    address: str
    """The address as domain:bus:device.function, for example 0000:1b:00.0."""
    path: tuple[str, ...]
    """The host bridge, every bridge on the path, and the address of the device itself."""
    vendor_id: int
    device_id: int
    class_id: int
    """Class and subclass. For example, 0x0302 is a 3D controller."""
    numa_node: int | None
    """None if the kernel does not know the node and the machine has several."""
    link_gt_per_s: float
    """Gigatransfers per second and lane of the current link, 0 if unknown."""
    link_lanes: int
    physical_function: str = ""
    """The address of the card's physical function if this is a virtual function (SR-IOV)."""
    virtual_functions: tuple[str, ...] = ()

    @property
    def card(self) -> str:
        """The address without the function, which identifies the card in one slot."""
        return self.address.rpartition(".")[0]

    @property
    def is_coherent_gpu(self) -> bool:
        """Whether this is a GPU that reaches its CPU, and the NICs behind it, by NVLink-C2C instead of PCIe."""
        return self.vendor_id == _NVIDIA and self.device_id in _COHERENT

    @property
    def link_gbps(self) -> float:
        """Gb/s of the slot in each direction after line coding, 0 if unknown. Packet headers cost some 10% more."""
        coding = 0.8 if self.link_gt_per_s <= 5 else 128 / 130
        return self.link_gt_per_s * self.link_lanes * coding


def normalize(address: str) -> str:
    """Returns an address in the kernel's form. CUDA and nvidia-smi write 00000000:1B:00.0 for 0000:1b:00.0."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain.lstrip('0'):0>4}:{rest}"


def device(root: Path, at: str, only_node: int | None) -> PciDevice | None:
    """Returns the device that contains the directory or link `at`, or None if it is not a PCI device.

    `only_node` is the only NUMA node of the machine, or None. A device with an unknown node gets that node.
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
        link_gt_per_s=leading_number(read(root, f"{at}/current_link_speed")),
        link_lanes=lanes if lanes <= _MOST_LANES else 0,
        physical_function=_target(root, f"{at}/physfn"),
        virtual_functions=tuple(
            _target(root, f"{at}/virtfn{number}") for number in numbered(root, at, "virtfn")
        ),
    )


def gpus(root: Path, only_node: int | None) -> tuple[PciDevice, ...]:
    """Returns the graphics and 3D controllers of NVIDIA by address, the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    found = []
    for address in sorted(names(root, DEVICES)):
        at = f"{DEVICES}/{address}"
        class_id = (read_int(root, f"{at}/class") or 0) >> 8
        if read_int(root, f"{at}/vendor") == _NVIDIA and class_id in _DISPLAY_CLASSES:
            found.append(device(root, at, only_node))
    return tuple(gpu for gpu in found if gpu)


def distance(a: PciDevice | None, b: PciDevice | None) -> Distance:
    """Returns the kind of path between two devices. None stands for a device without a PCI address."""
    if a is None or b is None:
        return Distance.DIS
    if a.card == b.card:
        return Distance.LOC
    shared = _num_shared(a.path, b.path)
    if shared > 1:  # a bridge, not the host bridge alone
        further = sum((len(path) - shared - 1) // _BRIDGES_PER_SWITCH for path in (a.path, b.path))
        return Distance.PXB if further else Distance.PIX
    nodes = {a.numa_node, b.numa_node}
    if shared and (None in nodes or len(nodes) == 1):
        return Distance.PHB
    return Distance.NODE if len(nodes) == 1 and None not in nodes else Distance.SYS


def distance_to_node(device: PciDevice | None, node: int | None) -> Distance:
    """Returns the kind of path between a device and the memory of a NUMA node, which is None if unknown."""
    if device is None:
        return Distance.DIS
    return Distance.PHB if node is not None and device.numa_node == node else Distance.SYS


def _num_shared(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(path, other, strict=False)) if a != b), min(len(path), len(other))
    )


def _target(root: Path, at: str) -> str:
    return Path(os.path.realpath(root / at)).name if (root / at).is_symlink() else ""
