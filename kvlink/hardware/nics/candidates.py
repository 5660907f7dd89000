# SPDX-License-Identifier: Apache-2.0
"""Lists every port with its path to one memory place, and finds the reasons why a port cannot be used from there."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv6Address, ip_network

from kvlink.errors import ConfigError
from kvlink.hardware.nics.values import MemoryPlace, RefusedNic, port_name
from kvlink.hardware.topology import (
    Distance,
    Gid,
    GidType,
    LinkLayer,
    PciDevice,
    PortState,
    RdmaDevice,
    RdmaPort,
    Topology,
    distance,
    distance_to_node,
    normalize,
)

# The kernel's costs between NUMA nodes are at least 10 and below this, so an unknown cost counts as the worst.
_UNKNOWN_COST = 255
_OPEN = "in a container pass --device=/dev/infiniband, or in Kubernetes ask an RDMA device plugin for it"
_SUBNET_MANAGER = "start the subnet manager of its fabric"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One port with its path to the memory."""

    device: RdmaDevice
    port: RdmaPort
    distance: Distance
    cost: int
    """The kernel's cost between the NUMA nodes of the memory and of the NIC, 0 for GPUs."""
    by_c2c: bool = False
    """Whether the path goes from a coherent GPU to the CPU by NVLink-C2C. It then counts as one through switches."""

    @property
    def name(self) -> str:
        """The name of the port in the form of KVLINK_NICS."""
        return port_name(self.device.name, self.port.number)

    @property
    def sort_key(self) -> tuple[Distance, int]:
        """A key that sorts nearer ports first."""
        return Distance.PXB if self.by_c2c else self.distance, self.cost

    @property
    def wire(self) -> tuple[str, int]:
        """Identifies the wire that the port shares with those of the card's other functions (SR-IOV)."""
        pci = self.device.pci
        return pci.physical_function or pci.address if pci else self.device.name, self.port.number

    @property
    def wire_rank(self) -> tuple[bool, bool]:
        """A key that sorts the functions of a wire: one with an address of this namespace first, then the physical."""
        gid = best_gid(self.device, self.port)
        return gid is None or not gid.is_here, bool(self.device.pci and self.device.pci.physical_function)

    @property
    def position(self) -> tuple[list[int], int]:
        """A key that sorts ports by PCI address and number."""
        return position(self.device.pci.address) if self.device.pci else [], self.port.number

    def refuse(self, reason: str, fix: str = "") -> RefusedNic:
        """Returns the refusal of this port."""
        return RefusedNic(self.device.name, self.port.number, reason, fix)


def candidates(topology: Topology, place: MemoryPlace) -> list[Candidate]:
    """Returns every port of the machine. Raises ConfigError if the machine does not have the GPU of `place`."""
    gpu = find_gpu(topology, place.gpu) if place.gpu else None
    if gpu and not place.bounced:
        return [
            Candidate(device, port, distance(gpu, device.pci), 0, _by_c2c(gpu, device.pci))
            for device in topology.nics
            for port in device.ports
        ]
    node = gpu.numa_node if gpu else topology.only_node if place.numa_node is None else place.numa_node
    return [
        Candidate(device, port, distance_to_node(device.pci, node), _cost(topology, node, device.pci))
        for device in topology.nics
        for port in device.ports
    ]


def position(address: str) -> list[int]:
    """Returns a key that sorts PCI addresses in the order of CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    return [int(part, 16) for part in normalize(address).replace(".", ":").split(":")]


def best_gid(device: RdmaDevice, port: RdmaPort, wanted: str = "") -> Gid | None:
    """Returns the GID that verbs uses, or None. `wanted` is the text of KVLINK_RDMA_GID.

    On Ethernet it is a RoCE v2 GID. Addresses of this network namespace are preferred to those of other ones (of other
    pods on the same NIC), routable addresses to link-local ones, and IPv4 to IPv6. On InfiniBand a GID by which routers
    forward comes first.
    """
    infiniband = port.link_layer is LinkLayer.INFINIBAND
    any_kind = device.is_iwarp or infiniband
    fitting = [gid for gid in port.gids if any_kind or gid.kind is GidType.ROCE_V2]
    fitting = [gid for gid in fitting if _is_wanted(gid, wanted)]
    return min(
        fitting,
        key=lambda gid: (not (infiniband and _flid(gid)), not gid.is_here, _gid_rank(gid), gid.index),
        default=None,
    )


def _flid(gid: Gid) -> int:
    """Returns the LID by which InfiniBand routers forward to the subnet of this GID, or 0."""
    return int.from_bytes(IPv6Address(gid.value).packed[4:6], "big")


def _is_wanted(gid: Gid, wanted: str) -> bool:
    if not wanted or wanted.isdigit():
        return not wanted or gid.index == int(wanted)
    return gid.address in ip_network(wanted, strict=False)


def down(candidate: Candidate) -> RefusedNic | None:
    """Returns the refusal of a port that is not up, or None."""
    port = candidate.port
    if port.state is PortState.ACTIVE:
        return None
    fix = f"ip link set {port.netdev} up" if port.netdev else _SUBNET_MANAGER
    reason = f"is {port.state.name} (physically {port.phys_state or 'unknown'})"
    return candidate.refuse(reason, f"check the cable, then: {fix}")


def unable(candidate: Candidate) -> RefusedNic | None:
    """Returns the refusal of a port that cannot carry a reliable connection now, or None."""
    device, port = candidate.device, candidate.port
    if device.is_efa:
        return candidate.refuse("is an Elastic Fabric Adapter (EFA), which has no reliable connections")
    if device.closed:
        return candidate.refuse(f"cannot be opened by this process: {device.closed}", _OPEN)
    if refusal := down(candidate):
        return refusal
    if port.link_layer is LinkLayer.UNKNOWN:
        return candidate.refuse("is neither InfiniBand nor Ethernet and has no reliable connections")
    if port.link_layer is LinkLayer.ETHERNET and best_gid(device, port) is None:
        fix = f"ip addr add ADDRESS/PREFIX dev {port.netdev or 'INTERFACE'}"
        return candidate.refuse("has no RoCE v2 GID", fix)
    if port.link_layer is LinkLayer.INFINIBAND and not port.lid:
        return candidate.refuse("has no LID", _SUBNET_MANAGER)
    return None


def no_gpudirect(candidate: Candidate) -> RefusedNic | None:
    """Returns the refusal of a port that has no path to a GPU, or None."""
    if candidate.distance is Distance.DIS:
        return candidate.refuse("is a soft device, which cannot reach GPU memory", "use a PCIe NIC")
    return None


def _by_c2c(gpu: PciDevice, nic: PciDevice | None) -> bool:
    return gpu.is_coherent_gpu and Distance.PHB <= distance(gpu, nic) <= Distance.NODE


def find_gpu(topology: Topology, address: str) -> PciDevice:
    """Returns the GPU with this PCI address. Raises ConfigError if the machine does not have it."""
    for gpu in topology.gpus:
        if gpu.address == normalize(address):
            return gpu
    there = ", ".join(gpu.address for gpu in topology.gpus) or "none"
    raise ConfigError(f"no GPU has the PCI address {address!r}; this machine's GPUs: {there}")


def _cost(topology: Topology, node: int | None, nic: PciDevice | None) -> int:
    ids = [other.id for other in topology.nodes]
    for here in topology.nodes:
        if here.id == node and nic is not None and nic.numa_node is not None:
            return dict(zip(ids, here.distances, strict=False)).get(nic.numa_node, _UNKNOWN_COST)
    return _UNKNOWN_COST


def _gid_rank(gid: Gid) -> int:
    if gid.address.is_loopback:
        return 3
    if gid.address.is_link_local:
        return 2
    return 0 if gid.address.version == 4 else 1
