# SPDX-License-Identifier: Apache-2.0
"""Checks RDMA ports and their network: state, GIDs, flow control."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_interface
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kvlink.doctor.verdict import Check, Run, Verdict, run_tool
from kvlink.hardware.sysfs import names, read, read_int
from kvlink.hardware.topology import GidType, LinkLayer, PortState, RdmaDevice, RdmaPort

_PRIORITY = 3  # the priority that vendors' guides use for RoCE


def checks(
    root: Path,
    nics: Sequence[RdmaDevice],
    active_mtus: Mapping[str, Sequence[int]],
    run: Run = run_tool,
    env: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown; without a device only the first.

    `active_mtus` has the MTUs that the driver reports, in bytes, per device and port. Others come from the interface.
    """
    yield ports(nics)
    if nics:
        yield gids(nics)
        yield agreement(root, nics, active_mtus)
        yield from shared_networks(root, nics, run)
        yield flow_control(root, nics, run, _traffic_class(env))


def _traffic_class(env: Mapping[str, str]) -> int:
    """Returns that of kvlink's packets. Another check names a malformed setting."""
    text = env.get("KVLINK_RDMA_TRAFFIC_CLASS", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def ports(nics: Sequence[RdmaDevice]) -> Check:
    """Shows every port: link layer, rate, state."""
    if not nics:
        return Check("rdma", Verdict.PASS, "absent: no RDMA device")
    evidence = "; ".join(_described(nic, port) for nic, port in _ports(nics))
    if all(nic.is_efa for nic in nics):
        return Check(
            "rdma",
            Verdict.WARN,
            evidence,
            "without another NIC, pulls take tcp",
        )
    down = [
        (nic, port) for nic, port in _ports(nics) if port.state is not PortState.ACTIVE and not nic.is_efa
    ]
    if not down:
        return Check("rdma", Verdict.PASS, evidence)
    fixes = dict.fromkeys(_how_to_bring_up(port) for _, port in down)
    return Check("rdma", Verdict.WARN, evidence, "; ".join(fixes))


def _ports(nics: Sequence[RdmaDevice]) -> list[tuple[RdmaDevice, RdmaPort]]:
    return [(nic, port) for nic in nics for port in nic.ports]


def _described(nic: RdmaDevice, port: RdmaPort) -> str:
    rate = f"{port.rate_gbps:g} Gb/s" if port.rate_gbps else "unknown rate"
    behind = f" ({port.netdev})" if port.netdev else ""
    kind = "iWARP" if nic.is_iwarp else port.link_layer.value
    if nic.is_efa:
        kind = "Elastic Fabric Adapter (EFA) without reliable connections"
    state = port.state.name.lower()
    link = f", link {port.phys_state}" if port.state is not PortState.ACTIVE else ""
    return f"{nic.name}:{port.number}{behind} {kind}, {rate}, {state}{link}"


def _how_to_bring_up(port: RdmaPort) -> str:
    if port.link_layer is LinkLayer.ETHERNET:
        return f"sudo ip link set {port.netdev or 'its network interface'} up"
    if port.phys_state == "LinkUp":
        return "start a subnet manager on the fabric (opensm)"
    return "check the cable and the switch port"


def gids(nics: Sequence[RdmaDevice]) -> Check:
    """Checks for RoCE v2 addresses, the only kind that kvlink uses. A link-local one ends at the first router."""
    found, without = [], []
    for nic, port in _ports(nics):
        if port.link_layer is not LinkLayer.ETHERNET or nic.is_iwarp:
            continue
        name = f"{nic.name}:{port.number}"
        v2 = [gid for gid in port.gids if gid.kind is GidType.ROCE_V2]
        addresses = ", ".join(
            f"{gid.address} (index {gid.index}{'' if gid.is_here else ', of another network namespace'})"
            for gid in v2
        )
        found.append(f"{name} {addresses or 'no RoCE v2 GID'}")
        if all(gid.address.is_link_local or not gid.is_here for gid in v2):
            without.append(port.netdev or "its interface")
    if not found:
        return Check("rdma gids", Verdict.PASS, "no RoCE port: nothing to check")
    if not without:
        return Check("rdma gids", Verdict.PASS, "; ".join(found))
    fix = "; ".join(f"sudo ip address add ADDRESS/LENGTH dev {netdev}" for netdev in dict.fromkeys(without))
    fix += " (a container needs an address of its own network namespace: the host network, or SR-IOV with the RDMA CNI)"
    return Check("rdma gids", Verdict.WARN, "; ".join(found), fix)


def shared_networks(root: Path, nics: Sequence[RdmaDevice], run: Run) -> Iterator[Check]:
    """Checks interfaces of one network: with Linux's defaults each answers ARP for the addresses of the others too, and
    packets for one port go to another. Yields nothing where each port has a network of its own."""
    roce = {port.netdev for _, port in _ports(nics) if port.link_layer is LinkLayer.ETHERNET}
    shared: dict[str, list[str]] = {}
    for words in map(str.split, run("ip", "-o", "-4", "address", "show").splitlines()):
        if len(words) > 3 and words[1] in roce:
            shared.setdefault(str(ip_interface(words[3]).network), []).append(words[1])
    shared = {network: netdevs for network, netdevs in shared.items() if len(set(netdevs)) > 1}
    if not shared:
        return
    evidence = "; ".join(f"{', '.join(netdevs)} are in {network}" for network, netdevs in shared.items())
    names_of = dict.fromkeys(netdev for netdevs in shared.values() for netdev in netdevs)
    fixes = [
        f"sudo sysctl -w net.ipv4.conf.{netdev}.{setting}={least}"
        for netdev in names_of
        for setting, least in (("arp_ignore", 1), ("arp_announce", 2))
        if max(_sysctl(root, netdev, setting), _sysctl(root, "all", setting)) < least
    ]
    verdict = Verdict.WARN if fixes else Verdict.PASS
    yield Check("rdma arp", verdict, evidence, "; ".join(fixes))


def _sysctl(root: Path, netdev: str, setting: str) -> int:
    return read_int(root, f"proc/sys/net/ipv4/conf/{netdev}/{setting}") or 0


def flow_control(root: Path, nics: Sequence[RdmaDevice], run: Run, traffic_class: int = 0) -> Check:
    """Checks that the network drops no RoCE packets, by PFC or at least ECN. The switches' side is not visible here.

    Both protect some priorities only. `traffic_class` is that of kvlink's packets (KVLINK_RDMA_TRAFFIC_CLASS). With 0
    they have priority 0 unless the driver marks them. Interfaces in the same state are shown together.
    """
    cards = {
        port.netdev: f"sys/class/infiniband/{nic.name}/tc/{port.number}/traffic_class"
        for nic, port in _ports(nics)
        if nic.pci and port.netdev and port.link_layer is LinkLayer.ETHERNET and not nic.is_iwarp
    }
    if not cards:
        return Check("rdma flow control", Verdict.PASS, "no RoCE card: nothing to configure")
    alike: dict[str, list[str]] = {}
    fixes: dict[str, str] = {}
    for netdev, mark_file in cards.items():
        pfc, ecn, mark = _pfc(run, netdev), _ecn(root, netdev), _mark(root, mark_file)
        marked = "" if mark is None else f", traffic class {mark}"
        state = f"PFC {_on(pfc)}, ECN {_on(ecn)}{marked}"
        alike.setdefault(state, []).append(netdev)
        guarded = sorted({*(pfc or ()), *(ecn or ())})
        if not guarded:
            fixes.setdefault(state, _how_to_flow(netdev, pfc is None))
        elif (mark or traffic_class) >> 5 not in guarded and (mark is not None or traffic_class):
            fixes.setdefault(state, _how_to_mark(netdev, guarded[0]))
    evidence = [f"{', '.join(netdevs)}: {state}" for state, netdevs in alike.items()]
    if traffic_class:
        evidence.append(f"KVLINK_RDMA_TRAFFIC_CLASS={traffic_class}, priority {traffic_class >> 5}")
    others = {
        state: f" (the same for {', '.join(netdevs[1:])})" for state, netdevs in alike.items() if netdevs[1:]
    }
    verdict = Verdict.WARN if fixes else Verdict.PASS
    fix = "; ".join(fix + others.get(state, "") for state, fix in fixes.items())
    return Check("rdma flow control", verdict, "; ".join(evidence), fix)


def _how_to_flow(netdev: str, unknown: bool) -> str:
    if unknown:
        return (
            f"sudo mlnx_qos -i {netdev}, or dcb pfc show dev {netdev}, or the vendor's tool, shows what is on"
        )
    enabled = ",".join("1" if priority == _PRIORITY else "0" for priority in range(8))
    ecn = f"/sys/class/net/{netdev}/ecn/roce_{{np,rp}}/enable/{_PRIORITY}"
    return f"sudo mlnx_qos -i {netdev} --pfc {enabled}; echo 1 | sudo tee {ecn}"


def _how_to_mark(netdev: str, priority: int) -> str:
    """Returns how kvlink's packets get a priority.

    Where DSCP is trusted, eight consecutive values share a priority. Guides take the third for RoCE (26 for 3).
    """
    dscp, able_to_ecn = 8 * priority + 2, 2
    mark = f"set KVLINK_RDMA_TRAFFIC_CLASS={dscp << 2 | able_to_ecn} at both ends"
    return f"{mark}, where the host trusts DSCP: sudo mlnx_qos -i {netdev} --trust dscp"


def _on(priorities: list[int] | None) -> str:
    if priorities is None:
        return "cannot tell"
    return f"on priority {', '.join(map(str, priorities))}" if priorities else "off"


def _pfc(run: Run, netdev: str) -> list[int] | None:
    """Returns the priorities with PFC, or None if no tool could report them."""
    if match := re.search(r"prio-pfc((?:\s+\d:\w+)+)", run("dcb", "pfc", "show", "dev", netdev)):
        return [int(pair[0]) for pair in match[1].split() if pair.endswith(":on")]
    if match := re.search(
        r"PFC configuration:.*?enabled((?:\s+[01])+)", run("mlnx_qos", "-i", netdev), re.DOTALL
    ):
        return [priority for priority, enabled in enumerate(match[1].split()) if enabled == "1"]
    return None


def _ecn(root: Path, netdev: str) -> list[int] | None:
    """Returns the priorities where this end both marks (np) and slows down (rp).

    Returns None if the driver has no such files.
    """
    at = f"sys/class/net/{netdev}/ecn"
    ends = [
        {
            int(name)
            for name in names(root, f"{at}/{end}/enable")
            if read(root, f"{at}/{end}/enable/{name}") == "1"
        }
        for end in ("roce_np", "roce_rp")
    ]
    return sorted(ends[0] & ends[1]) if (root / at).is_dir() else None


def _mark(root: Path, mark_file: str) -> int | None:
    """Returns the traffic class that the driver sets in every packet (0: none), or None if it has no such file."""
    if not (root / mark_file).is_file():
        return None
    match = re.search(r"tclass=(\d+)", read(root, mark_file))
    return int(match[1]) if match else 0


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
    ports = [port for port in _mtu_ports(root, nics, active) if port.mtu]
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


def _mtu_ports(
    root: Path, nics: Sequence[RdmaDevice], active: Mapping[str, Sequence[int]]
) -> Iterator[_Port]:
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
