# SPDX-License-Identifier: Apache-2.0
"""Checks the largest payload of an RDMA packet, port by port, and the Ethernet MTU that determines it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware.sysfs import read_int
from kvlink.hardware.topology import LinkLayer, PortState, RdmaDevice

# RoCE v2 headers with every optional one, as the kernel's iboe_get_mtu() counts: GRH, UDP, BTH, XRC, atomics, ICRC.
_ROCE_HEADER_BYTES = 96
_MTUS = (4096, 2048, 1024, 512, 256)
_ASK = "ibv_devinfo -v | grep active_mtu"


class _Port(NamedTuple):
    name: str
    netdev: str
    netdev_mtu: int
    """The MTU of the interface in bytes; 0 if there is none, or it is not visible."""
    active: int
    """The active MTU that the driver reports, in bytes; 0 if it was not queried."""
    is_soft: bool

    @property
    def mtu(self) -> int:
        return self.active or roce_mtu(self.netdev_mtu)

    def __str__(self) -> str:
        behind = f" ({self.netdev} has {self.netdev_mtu})" if self.netdev_mtu else ""
        return f"{self.name} {self.mtu}{behind}"


def agreement(root: Path, nics: Sequence[RdmaDevice], active: Mapping[str, Sequence[int]]) -> Check:
    """Finds ports that waste bandwidth on headers, lag behind their interface, or differ from each other."""
    ports = [port for port in _ports(root, nics, active) if port.mtu]
    if not ports:
        return Check(
            "rdma mtu",
            Verdict.PASS,
            "unknown to driver and interface; the fabric's subnet manager sets it",
            _ASK,
        )
    evidence, fixes = "; ".join(map(str, ports)), list[str]()
    if lagging := [
        port for port in ports if port.netdev_mtu and port.active not in (0, roce_mtu(port.netdev_mtu))
    ]:
        evidence += f". {_names(lagging)} did not follow the interface's MTU"
        fixes += [
            f"sudo ip link set {port.netdev} down; sudo ip link set {port.netdev} up" for port in lagging
        ]
    if len({port.mtu for port in ports}) > 1:
        evidence += ". Ports differ: pulls between them use the smaller"
    wanted = _MTUS[0] if any(not port.is_soft for port in ports) else max(port.mtu for port in ports)
    small = [port for port in ports if port.netdev_mtu and roce_mtu(port.netdev_mtu) < wanted]
    fixes += [f"sudo ip link set {port.netdev} mtu 9000 (switches and peers too)" for port in small]
    if fixes or "differ" in evidence:
        return Check("rdma mtu", Verdict.WARN, evidence, "; ".join(dict.fromkeys(fixes)) or _ASK)
    return Check("rdma mtu", Verdict.PASS, evidence)


def roce_mtu(netdev_mtu: int) -> int:
    """Returns the largest RDMA MTU that fits into an interface's MTU; 0 for 0."""
    return next(
        (size for size in _MTUS if size <= netdev_mtu - _ROCE_HEADER_BYTES), _MTUS[-1] if netdev_mtu else 0
    )


def _ports(root: Path, nics: Sequence[RdmaDevice], active: Mapping[str, Sequence[int]]) -> Iterator[_Port]:
    for nic in nics:
        reported = dict(zip((port.number for port in nic.ports), active.get(nic.name, ()), strict=False))
        for port in nic.ports:
            if port.state is PortState.ACTIVE:
                ethernet = port.netdev if port.link_layer is LinkLayer.ETHERNET else ""
                netdev_mtu = read_int(root, f"sys/class/net/{ethernet}/mtu") if ethernet else None
                active_mtu = reported.get(port.number, 0)
                name = f"{nic.name}:{port.number}"
                yield _Port(name, ethernet, netdev_mtu or 0, active_mtu, nic.pci is None)


def _names(ports: Sequence[_Port]) -> str:
    return ", ".join(port.name for port in ports)
