# SPDX-License-Identifier: Apache-2.0
"""What the choice of NICs takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.hardware.topology import Distance, LinkLayer


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where blocks are: on a GPU, in host memory of a NUMA node, or (neither given) somewhere in host memory."""

    gpu: str = ""
    """PCI address, in the kernel's or CUDA's spelling."""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class NicChoice:
    """A port to use. `weight` is in Gb/s: what the path leaves of the link."""

    device: str
    port: int
    gid_index: int
    gid: str
    """As the kernel writes it; "" on an InfiniBand port that has none."""
    link_layer: LinkLayer
    rate_gbps: float
    distance: Distance
    weight: float


@dataclass(frozen=True, slots=True)
class RefusedNic:
    """A port that is left out. `fix` says what would bring it in; empty: nothing should."""

    device: str
    port: int
    reason: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{port_name(self.device, self.port)} {self.reason}" + (f"; {self.fix}" if self.fix else "")


@dataclass(frozen=True, slots=True)
class NicSelection:
    """The ports for one memory place, in human order of their names or in the operator's."""

    chosen: tuple[NicChoice, ...]
    refused: tuple[RefusedNic, ...]


def port_name(device: str, port: int | None) -> str:
    """As KVLINK_NICS writes it: mlx5_0:1, or mlx5_0 for every port."""
    return device if port is None else f"{device}:{port}"


def port_and_mbps(nic: NicChoice) -> tuple[str, int]:
    """As csrc/transport_api/transport.h takes it."""
    return port_name(nic.device, nic.port), max(round(1000 * nic.weight), 1)
