# SPDX-License-Identifier: Apache-2.0
"""Reads the topology of the machine from the kernel: CPUs, NUMA nodes, GPUs, RDMA NICs, and the paths between them."""

from kvlink.hardware.topology.cpu import CacheLevel, HugePages, NumaNode
from kvlink.hardware.topology.machine import Topology, discover
from kvlink.hardware.topology.pci import Distance, PciDevice, distance, distance_to_node, normalize
from kvlink.hardware.topology.rdma import Gid, GidType, LinkLayer, PortState, RdmaDevice, RdmaPort

__all__ = [
    "CacheLevel",
    "Distance",
    "Gid",
    "GidType",
    "HugePages",
    "LinkLayer",
    "NumaNode",
    "PciDevice",
    "PortState",
    "RdmaDevice",
    "RdmaPort",
    "Topology",
    "discover",
    "distance",
    "distance_to_node",
    "normalize",
]
