# SPDX-License-Identifier: Apache-2.0
"""Defines the arguments and results of the selection of NICs."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.hardware.topology import Distance, LinkLayer


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """The place of blocks: a GPU, the host memory of a NUMA node, or with neither set, any host memory."""

    gpu: str = ""
    """PCI address in the form of the kernel or of CUDA."""
    numa_node: int | None = None
    bounced: bool = False
    """Whether the bytes of the GPU pass through host memory near it, so that NICs need not reach the GPU."""


@dataclass(frozen=True, slots=True)
class NicChoice:
    """A port to use. `weight` is the estimated rate in Gb/s that the path achieves of the link's rate."""

    device: str
    port: int
    gid_index: int
    gid: str
    """The GID in the kernel's form, or "" on an InfiniBand port that has none."""
    link_layer: LinkLayer
    rate_gbps: float
    distance: Distance
    weight: float


@dataclass(frozen=True, slots=True)
class RefusedNic:
    """A port that is not used. `fix` says what would make it usable, and is empty if it should not be used."""

    device: str
    port: int | None
    """None if `device` names the port, too."""
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{port_name(self.device, self.port)} {self.reason}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class NicSelection:
    """The ports for one memory place, in human order of their names or in the operator's order."""

    chosen: tuple[NicChoice, ...]
    refused: tuple[RefusedNic, ...]
    warning: str = ""
    """Says that the bytes pass through the CPU between the GPU and the chosen ports, or is empty."""


def port_name(device: str, port: int | None) -> str:
    """Returns the name in the form of KVLINK_NICS: mlx5_0:1, or mlx5_0 for every port."""
    return device if port is None else f"{device}:{port}"


def port_and_mbps(nic: NicChoice) -> tuple[str, int]:
    """Returns name and weight in Mb/s, at least 1, in the form that csrc/transport_api/transport.h expects."""
    return port_name(nic.device, nic.port), max(round(1000 * nic.weight), 1)
