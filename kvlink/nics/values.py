# SPDX-License-Identifier: Apache-2.0
"""What the choice of NICs takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from kvlink.topology import Distance, LinkLayer


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """Where blocks are: on a GPU, in host memory of a NUMA node, or (neither given) somewhere in host memory."""

    gpu: str = ""
    """PCI address, in the kernel's or CUDA's spelling."""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class NicChoice:
    """A port to use. Weights compare with each other only; they are Gb/s scaled by what the path leaves."""

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

    def offers(self) -> tuple[NicOffer, ...]:
        """What peers are told, in the same order."""
        return tuple(
            NicOffer(nic.device, nic.port, nic.link_layer, nic.rate_gbps, nic.weight) for nic in self.chosen
        )


@dataclass(frozen=True, slots=True)
class NicOffer:
    """A port as a worker publishes it. The order in which it lists them numbers the rails."""

    device: str
    port: int
    link_layer: LinkLayer
    rate_gbps: float
    weight: float


@dataclass(frozen=True, slots=True)
class Rail:
    """One local and one remote port, as indices into the two lists. Weights compare within one pairing."""

    local: int
    remote: int
    weight: float


def port_name(device: str, port: int | None) -> str:
    """As KVLINK_NICS writes it: mlx5_0:1, or mlx5_0 for every port."""
    return device if port is None else f"{device}:{port}"
