# SPDX-License-Identifier: Apache-2.0
"""Kernel trees of published server shapes, written file by file under a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from kvlink.hardware.topology import Topology, discover

GPU, NIC, BRIDGE = 0x030200, 0x020000, 0x060400
NVIDIA, MELLANOX, BROADCOM, AMAZON = 0x10DE, 0x15B3, 0x1000, 0x1D0F
ROCE_V1, ROCE_V2 = "IB/RoCE v1", "RoCE v2"


def mapped(ipv4: str) -> str:
    """A GID as the kernel writes it: ::ffff:10.0.0.1."""
    a, b, c, d = map(int, ipv4.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


LINK_LOCAL = "fe80:0000:0000:0000:0a3f:d2ff:fe06:0001"
GLOBAL_IPV6 = "2001:0db8:0000:0000:0000:0000:0000:0001"


@dataclass(frozen=True)
class Port:
    rate: int = 400
    layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    phys: str = "5: LinkUp"
    lid: int | None = None
    gids: Sequence[tuple[str, str]] | None = None
    """(value, type) by index; None: what a port of its layer usually has."""
    netdev: str = ""

    def usual_gids(self, number: int) -> Sequence[tuple[str, str]]:
        if self.layer == "InfiniBand":
            return [(LINK_LOCAL, ROCE_V1)]
        address = mapped(f"10.0.{number}.1")
        return [(LINK_LOCAL, ROCE_V1), (LINK_LOCAL, ROCE_V2), (address, ROCE_V1), (address, ROCE_V2)]


DOWN = Port(state="1: DOWN", phys="3: Disabled", gids=[])
ETHERNET = Port(layer="Ethernet", netdev="eth1")


@dataclass
class Machine:
    """Writes sysfs under `root`. `bus` numbers buses so that no two devices have one address."""

    root: Path
    num_nodes: int = 1
    bus: count[int] = field(default_factory=lambda: count(0x10))

    def __post_init__(self) -> None:
        self.write("sys/devices/system/cpu/online", f"0-{self.num_nodes - 1}")
        for node in range(self.num_nodes):
            costs = " ".join("10" if other == node else "21" for other in range(self.num_nodes))
            self.write(f"sys/devices/system/node/node{node}/cpulist", str(node))
            self.write(f"sys/devices/system/node/node{node}/distance", costs)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text + "\n")

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(os.path.relpath(self.root / target, (self.root / path).parent))

    def pci(
        self, parent: str, vendor: int, kind: int, node: int, slot: str = "", device: str = "0x1021"
    ) -> str:
        """Adds a function under `parent` ("" a new host bridge) and returns its folder."""
        parent = parent or self.host_bridge()
        address = slot or f"0000:{next(self.bus):02x}:00.0"
        at = f"{parent}/{address}"
        for name, text in {
            "vendor": f"{vendor:#06x}", "device": device, "class": f"{kind:#08x}", "numa_node": str(node),
            "current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16",
        }.items():  # fmt: skip
            self.write(f"{at}/{name}", text)
        self.link(f"sys/bus/pci/devices/{address}", at)
        return at

    def host_bridge(self) -> str:
        return f"sys/devices/pci0000:{next(self.bus):02x}"

    def domain(self) -> tuple[str, str]:
        """A host bridge with a PCI domain of its own, and the address of the device on it."""
        number = next(self.bus)
        return f"sys/devices/pci{number:04x}:00", f"{number:04x}:00:00.0"

    def root_port(self, node: int, parent: str = "") -> str:
        return self.pci(parent, BROADCOM, BRIDGE, node)

    def switch(self, parent: str, node: int, num_ports: int) -> list[str]:
        """A PCIe switch: the folders of its downstream ports."""
        upstream = self.pci(parent, BROADCOM, BRIDGE, node)
        return [self.pci(upstream, BROADCOM, BRIDGE, node) for _ in range(num_ports)]

    def gpu(self, parent: str, node: int, slot: str = "", device: str = "0x2330") -> str:
        return self.pci(parent, NVIDIA, GPU, node, slot, device)

    def nic(
        self, name: str, parent: str, node: int, *ports: Port, slot: str = "", vendor: int = MELLANOX
    ) -> str:
        at = self.pci(parent, vendor, NIC, node, slot)
        self.rdma(name, f"{at}/infiniband/{name}", ports or (Port(),))
        self.link(f"{at}/infiniband/{name}/device", at)
        for number, port in enumerate(ports):
            if port.netdev:
                self.write(f"{at}/net/{port.netdev}/dev_port", str(number))
        return at

    def soft(self, name: str, netdev: str, *ports: Port) -> None:
        at = f"sys/devices/virtual/infiniband/{name}"
        self.rdma(name, at, ports or (Port(layer="Ethernet", rate=10, netdev=netdev),))
        self.write(f"{at}/parent", netdev)

    def rdma(self, name: str, at: str, ports: Sequence[Port]) -> None:
        self.write(f"{at}/node_guid", "b83f:d203:006a:e616")
        self.write(f"{at}/node_type", "1: CA")
        self.write(f"{at}/fw_ver", "28.39.1002")
        for number, port in enumerate(ports, 1):
            self.port(f"{at}/ports/{number}", number, port)
        self.link(f"sys/class/infiniband/{name}", at)

    def port(self, at: str, number: int, port: Port) -> None:
        lid = (0 if port.layer == "Ethernet" else 0x10 + number) if port.lid is None else port.lid
        for name, text in {
            "state": port.state, "phys_state": port.phys, "link_layer": port.layer,
            "rate": f"{port.rate} Gb/sec (4X NDR)", "lid": f"{lid:#x}",
        }.items():  # fmt: skip
            self.write(f"{at}/{name}", text)
        gids = port.usual_gids(number) if port.gids is None else port.gids
        for index, (value, kind) in enumerate([*gids, ("0000:" * 7 + "0000", "")]):
            self.write(f"{at}/gids/{index}", value)
            if kind:
                self.write(f"{at}/gid_attrs/types/{index}", kind)
            if port.netdev and kind:
                self.write(f"{at}/gid_attrs/ndevs/{index}", port.netdev)

    def discover(self) -> Topology:
        return discover(self.root)


def dgx_h100(root: Path) -> Machine:
    """Two sockets, 8 GPUs, 12 ports as the kernel numbers them there. One compute NIC beside each GPU on a
    switch of the first level, the GPU on one of the second: PXB. mlx5_1+2 and mlx5_7+8 are the two-port
    storage cards (matrix: github.com/vllm-project/vllm/issues/6746)."""
    machine = Machine(root, num_nodes=2)
    compute = iter((0, 3, 4, 5, 6, 9, 10, 11))
    for gpu in range(8):
        node = gpu // 4
        first, second = machine.switch(machine.root_port(node), node, 2)
        machine.gpu(machine.switch(second, node, 1)[0], node)
        machine.nic(f"mlx5_{next(compute)}", first, node)
    for node, (one, other) in enumerate(((1, 2), (7, 8))):
        port = machine.root_port(node)
        card = f"0000:{next(machine.bus):02x}:00"
        for function, name in enumerate((one, other)):
            storage = Port(200, "Ethernet", netdev=f"storage{name}")
            machine.nic(f"mlx5_{name}", port, node, storage, slot=f"{card}.{function}")
    return machine


def _one_switch_a_gpu(root: Path, netdev: str) -> Machine:
    """Builds eight GPUs on two nodes, each on a switch with its RoCE NIC, whose interface is `netdev` with a number."""
    machine = Machine(root, num_nodes=2)
    for index in range(8):
        node = index // 4
        first, second = machine.switch(machine.root_port(node), node, 2)
        machine.gpu(first, node)
        machine.nic(f"mlx5_{index}", second, node, Port(layer="Ethernet", netdev=netdev.format(index)))
    return machine


def hgx_h100(root: Path) -> Machine:
    """One switch for each GPU and its NIC: PIX (matrix: github.com/NVIDIA/nccl/issues/1264)."""
    machine = _one_switch_a_gpu(root, "rail{}")
    machine.nic("mlx5_8", machine.root_port(0), 0, Port(25, "Ethernet", netdev="mgmt0"))
    return machine


def hgx_pairs(root: Path) -> Machine:
    """Four switches, two GPUs and one NIC on each: an HGX board with four NICs."""
    machine = Machine(root, num_nodes=2)
    for index in range(4):
        node = index // 2
        one, other, nic = machine.switch(machine.root_port(node), node, 3)
        machine.gpu(one, node)
        machine.gpu(other, node)
        machine.nic(f"mlx5_{index}", nic, node, Port(200))
    return machine


def cloud_vm(root: Path, num_nodes: int = 1) -> Machine:
    """Everything on one virtual host bridge, without NUMA nodes or link speeds (NVIDIA/nccl issues 1464, 1674)."""
    machine = Machine(root, num_nodes)
    bridge = machine.host_bridge()
    folders = [machine.gpu(bridge, -1) for _ in range(2)]
    folders += [
        machine.nic(f"mlx5_{n}", bridge, -1, Port(100, "Ethernet", netdev=f"eth{n}")) for n in range(2)
    ]
    for at in folders:
        machine.write(f"{at}/current_link_speed", "Unknown")
        machine.write(f"{at}/current_link_width", "63")
    return machine


def cpu_server(root: Path) -> Machine:
    """No GPU; one NIC a socket."""
    machine = Machine(root, num_nodes=2)
    for node in range(2):
        machine.nic(f"mlx5_{node}", machine.root_port(node), node, Port(100, "Ethernet", netdev=f"eth{node}"))
    return machine


def only_soft(root: Path) -> Machine:
    """Two rxe devices on one interface each, and a GPU that they cannot reach."""
    machine = Machine(root)
    machine.gpu(machine.root_port(0), 0)
    machine.soft("rxe0", "lo")
    machine.soft("rxe1", "veth0")
    return machine


def gb200_nvl72(root: Path) -> Machine:
    """A compute tray: two Grace CPUs, each with two GPUs and two NICs on root ports in PCI domains of their own."""
    machine = Machine(root, num_nodes=2)
    for index in range(4):
        bridge, slot = machine.domain()
        machine.gpu(bridge, index // 2, slot, "0x2941")
    for index in range(4):
        bridge, slot = machine.domain()
        machine.nic(f"mlx5_{index}", bridge, index // 2, slot=slot)
    return machine


def gh200(root: Path) -> Machine:
    """One Grace CPU with one GPU, and two NICs on root ports (github.com/NVIDIA/nccl/issues/1579)."""
    machine = Machine(root)
    bridge, slot = machine.domain()
    machine.gpu(bridge, 0, slot, "0x2342")
    for index in range(2):
        bridge, slot = machine.domain()
        machine.nic(f"mlx5_{index}", bridge, 0, Port(200), slot=slot)
    return machine


def l40s_box(root: Path) -> Machine:
    """Two sockets, each with two GPUs and one NIC on root ports of their own: NODE."""
    machine = Machine(root, num_nodes=2)
    for node in range(2):
        for _ in range(2):
            machine.gpu(machine.root_port(node), node, device="0x26b9")
        machine.nic(
            f"mlx5_{node}", machine.root_port(node), node, Port(layer="Ethernet", netdev=f"rail{node}")
        )
    return machine


def azure_nd(root: Path) -> Machine:
    """Eight GPUs and eight NICs, each in a PCI domain of its own, four to a NUMA node (Azure/aks-rdma-infiniband#36).

    The NICs are numbered against the PCI order.
    """
    machine = Machine(root, num_nodes=2)
    for index in range(8):
        bridge, slot = machine.domain()
        machine.gpu(bridge, index // 4, slot)
    for index in range(8):
        bridge, slot = machine.domain()
        machine.nic(f"mlx5_{7 - index}", bridge, index // 4, slot=slot)
    return machine


def aws_p5(root: Path) -> Machine:
    """Eight GPUs beside four EFA devices each, which are neither InfiniBand nor Ethernet."""
    machine = Machine(root, num_nodes=2)
    for index in range(8):
        node = index // 4
        first, *others = machine.switch(machine.root_port(node), node, 5)
        machine.gpu(first, node)
        for number, port in enumerate(others):
            name = f"rdmap{4 * index + number}s0"
            machine.nic(name, port, node, Port(100, "Unspecified"), vendor=AMAZON)
    return machine


def gcp_a3_ultra(root: Path) -> Machine:
    """Eight GPUs with one RoCE NIC each behind a switch that the VM shows."""
    return _one_switch_a_gpu(root, "gpu{}rdma0")
