# SPDX-License-Identifier: Apache-2.0
"""Lists every port with its path to one memory place, and finds the reasons why a port cannot be used from there."""

from __future__ import annotations

from dataclasses import dataclass

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

_FARTHEST_GPUDIRECT = Distance.PXB
# The kernel's costs between NUMA nodes are at least 10 and below this, so an unknown cost counts as the worst.
_UNKNOWN_COST = 255
_SUBNET_MANAGER = "start the subnet manager of its fabric"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One port with its path to the memory."""

    device: RdmaDevice
    port: RdmaPort
    distance: Distance
    cost: int
    """The kernel's cost between the NUMA nodes of the memory and of the NIC, 0 for GPUs."""

    @property
    def name(self) -> str:
        """The name of the port in the form of KVLINK_NICS."""
        return port_name(self.device.name, self.port.number)

    @property
    def sort_key(self) -> tuple[Distance, int]:
        """A key that sorts nearer ports first."""
        return self.distance, self.cost

    def refuse(self, reason: str, fix: str = "") -> RefusedNic:
        """Returns the refusal of this port."""
        return RefusedNic(self.device.name, self.port.number, reason, fix)


def candidates(topology: Topology, place: MemoryPlace) -> list[Candidate]:
    """Returns every port of the machine. Raises ConfigError if the machine does not have the GPU of `place`."""
    gpu = _gpu(topology, place.gpu) if place.gpu else None
    node = topology.only_node if place.numa_node is None else place.numa_node
    found = []
    for device in topology.nics:
        apart = distance(gpu, device.pci) if gpu else distance_to_node(device.pci, node)
        cost = 0 if gpu else _cost(topology, node, device.pci)
        found += [Candidate(device, port, apart, cost) for port in device.ports]
    return found


def best_gid(device: RdmaDevice, port: RdmaPort) -> Gid | None:
    """Returns the GID that peers should use, or None. On Ethernet it is a RoCE v2 GID.

    Routable addresses are preferred to link-local ones, and IPv4 to IPv6.
    """
    any_kind = device.is_iwarp or port.link_layer is LinkLayer.INFINIBAND
    fitting = [gid for gid in port.gids if any_kind or gid.kind is GidType.ROCE_V2]
    return min(fitting, key=lambda gid: (_gid_rank(gid), gid.index), default=None)


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


def no_gpudirect(candidate: Candidate, named: bool) -> RefusedNic | None:
    """Returns the refusal of a port whose path to the GPU goes through the CPU, or None.

    `named` says whether the operator named the port, which permits such a path.
    """
    apart = candidate.distance
    if apart is Distance.DIS:
        return candidate.refuse("is a soft device, which cannot reach GPU memory", "use a PCIe NIC")
    if named or apart <= _FARTHEST_GPUDIRECT:
        return None
    return candidate.refuse(
        f"is {apart.name} from the GPU, and GPUDirect needs {_FARTHEST_GPUDIRECT.name} or nearer",
        f"set KVLINK_NICS={candidate.name} if a hypervisor hides the PCIe switches, or to use it anyway",
    )


def _gpu(topology: Topology, address: str) -> PciDevice:
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
