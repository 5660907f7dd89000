# SPDX-License-Identifier: Apache-2.0
"""Collects what sysfs and procfs show about one machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvlink.hardware.topology import cpu, pci, rdma
from kvlink.hardware.topology.cpu import CacheLevel, NumaNode
from kvlink.hardware.topology.pci import PciDevice
from kvlink.hardware.topology.rdma import RdmaDevice


@dataclass(frozen=True, slots=True)
class Topology:
    """The topology of a machine. A kernel without NUMA support gives one node with all CPUs."""

    cpu_model: str
    num_sockets: int
    num_cores: int
    num_threads: int
    nodes: tuple[NumaNode, ...]
    caches: tuple[CacheLevel, ...]
    gpus: tuple[PciDevice, ...] = ()
    nics: tuple[RdmaDevice, ...] = ()

    @property
    def only_node(self) -> int | None:
        """The id of the only NUMA node, or None if there are several."""
        return self.nodes[0].id if len(self.nodes) == 1 else None


def discover(root: Path = Path("/"), *, gids: bool = True) -> Topology:
    """Reads the topology under `root`. Absent files give zeros and "unknown", never an error.

    `gids=False` skips the GIDs of the NICs, which are up to a thousand files per port.
    """
    processors, nodes = cpu.cpus(root), cpu.numa_nodes(root)
    only_node = nodes[0].id if len(nodes) == 1 else None
    return Topology(
        cpu_model=processors.model,
        num_sockets=processors.num_sockets,
        num_cores=processors.num_cores,
        num_threads=processors.num_threads,
        nodes=nodes,
        caches=processors.caches,
        gpus=pci.gpus(root, only_node),
        nics=rdma.devices(root, only_node, gids),
    )
