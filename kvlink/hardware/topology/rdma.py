# SPDX-License-Identifier: Apache-2.0
"""Reads RDMA devices, their ports and GIDs. `kvlink.hardware.device_caps` asks the driver for MTU and limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import TypeVar

from kvlink.hardware.sysfs import (
    leading_number,
    local_addresses,
    names,
    numbered,
    read,
    read_int,
    why_closed,
)
from kvlink.hardware.topology import pci
from kvlink.hardware.topology.pci import PciDevice

DEVICES = "sys/class/infiniband"
_NODES = "sys/class/infiniband_verbs"
_AMAZON = 0x1D0F
_Known = TypeVar("_Known", bound=Enum)
Addresses = frozenset[IPv4Address | IPv6Address]


class LinkLayer(Enum):
    """The kind of network that a port is connected to. Ports of different layers cannot reach each other."""

    INFINIBAND = "InfiniBand"
    ETHERNET = "Ethernet"
    UNKNOWN = "Unknown"
    """The port has neither of the two, for example with EFA."""


class GidType(Enum):
    """The framing of packets that use a GID, with the names of the kernel."""

    IB_OR_ROCE_V1 = "IB/RoCE v1"
    ROCE_V2 = "RoCE v2"
    UNKNOWN = ""


class PortState(Enum):
    """The state of a port, with the numbers of the kernel. Only an ACTIVE port carries data."""

    UNKNOWN = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


@dataclass(frozen=True, slots=True)
class Gid:
    """One address of a port."""

    index: int
    value: str
    """Eight groups of four hex digits, in the kernel's form."""
    kind: GidType
    netdev: str
    """The network interface of the GID, or "" on InfiniBand. Some kernels show those of other namespaces, too."""
    is_here: bool = True
    """Whether the address is one of this network namespace. True for what cannot be told."""

    @property
    def address(self) -> IPv4Address | IPv6Address:
        """The IP address that a RoCE GID encodes. An IPv4-mapped address is returned as IPv4."""
        address = IPv6Address(self.value)
        return address.ipv4_mapped or address


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of a device."""

    number: int
    state: PortState
    phys_state: str
    """LinkUp, Polling, Disabled…"""
    link_layer: LinkLayer
    rate_gbps: float
    """Gb/s of all lanes together, 0 if unknown."""
    lid: int
    """The address within an InfiniBand subnet, 0 on Ethernet."""
    gids: tuple[Gid, ...]
    """The GIDs that are set, by index."""
    netdev: str


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device, with its name in verbs."""

    name: str
    pci: PciDevice | None
    """None for a soft device (rxe, siw)."""
    node_guid: str
    firmware: str
    hca_type: str
    is_iwarp: bool
    ports: tuple[RdmaPort, ...]
    closed: str = ""
    """Why this process cannot open the device, or ""."""

    @property
    def is_efa(self) -> bool:
        """Whether this is an Elastic Fabric Adapter of Amazon, which has no reliable connections."""
        return self.pci is not None and self.pci.vendor_id == _AMAZON


def devices(root: Path, only_node: int | None, gids: bool = True) -> tuple[RdmaDevice, ...]:
    """Returns every device in human order of the names. Without `gids`, the ports have no GIDs."""
    nodes = {read(root, f"{_NODES}/{node}/ibdev"): node for node in names(root, _NODES)}
    here = local_addresses(root) if gids else frozenset()
    return tuple(_device(root, name, only_node, gids, nodes, here) for name in names(root, DEVICES))


def _device(
    root: Path, name: str, only_node: int | None, with_gids: bool, nodes: Mapping[str, str], here: Addresses
) -> RdmaDevice:
    at = f"{DEVICES}/{name}"
    # Only soft devices have `parent`, the interface that they use. The card of that interface is not the device's.
    upper = read(root, f"{at}/parent")
    return RdmaDevice(
        name=name,
        pci=None if upper else pci.device(root, f"{at}/device", only_node),
        node_guid=read(root, f"{at}/node_guid"),
        firmware=read(root, f"{at}/fw_ver"),
        hca_type=read(root, f"{at}/hca_type"),
        is_iwarp=read(root, f"{at}/node_type").endswith("RNIC"),
        ports=tuple(
            _port(root, at, number, upper, with_gids, here) for number in numbered(root, f"{at}/ports")
        ),
        closed=why_closed(root / "dev/infiniband" / nodes[name]) if name in nodes else "",
    )


def _port(root: Path, device: str, number: int, upper: str, with_gids: bool, here: Addresses) -> RdmaPort:
    at = f"{device}/ports/{number}"
    indices = numbered(root, f"{at}/gids") if with_gids else []
    gids = tuple(gid for index in indices if (gid := _gid(root, at, index, here)))
    behind = next((gid.netdev for gid in gids if gid.netdev), "")
    return RdmaPort(
        number=number,
        state=_known(PortState, leading_number(read(root, f"{at}/state"))),
        phys_state=read(root, f"{at}/phys_state").partition(": ")[2],
        link_layer=_known(LinkLayer, read(root, f"{at}/link_layer")),
        rate_gbps=leading_number(read(root, f"{at}/rate")),
        lid=read_int(root, f"{at}/lid") or 0,
        gids=gids,
        netdev=behind or upper or _netdev_of(root, device, number),
    )


def _gid(root: Path, port: str, index: int, here: Addresses) -> Gid | None:
    value = read(root, f"{port}/gids/{index}")
    if not value.strip("0:") or not _is_address(value):
        return None
    gid = Gid(
        index=index,
        value=value,
        kind=_known(GidType, read(root, f"{port}/gid_attrs/types/{index}")),
        netdev=read(root, f"{port}/gid_attrs/ndevs/{index}"),
    )
    # The GID of InfiniBand, and a link-local one, is not the address of an interface.
    foreign = (
        here and gid.kind is GidType.ROCE_V2 and not gid.address.is_link_local and gid.address not in here
    )
    return replace(gid, is_here=not foreign)


def _is_address(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def _netdev_of(root: Path, device: str, port: int) -> str:
    """Returns the card's network interface with the number of this port, for a port that is down and has no GID."""
    interfaces = names(root, f"{device}/device/net")
    numbers = [(name, read_int(root, f"{device}/device/net/{name}/dev_port")) for name in interfaces]
    return next((name for name, number in numbers if number == port - 1), "")


def _known(kind: type[_Known], value: str | float) -> _Known:
    """Returns the member of an enumeration with this value, or UNKNOWN, which each of those above has."""
    return next((member for member in kind if member.value == value), kind["UNKNOWN"])
