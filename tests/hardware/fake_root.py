# SPDX-License-Identifier: Apache-2.0
"""A root folder with the kernel files of a machine that was never there."""

from __future__ import annotations

import struct
from pathlib import Path

GPU = ("0x10de", "0x030200")
NIC = ("0x15b3", "0x020000")
BRIDGE = ("0x1000", "0x060400")
ROCE_V2, ROCE_V1 = "RoCE v2", "IB/RoCE v1"
LINK_LOCAL = "fe80:0000:0000:0000:0e42:a1ff:fe2b:0001"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"


class FakeRoot:
    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, path: str, text: str | bytes = "") -> None:
        at = self.path / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(text if isinstance(text, bytes) else f"{text}\n".encode())

    def link(self, path: str, target: str) -> None:
        at = self.path / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(self.path / target if not target.startswith("/") else target)

    def card(
        self, address: str, kind: tuple[str, str], below: tuple[str, ...] = (), **files: str | bytes
    ) -> str:
        """One PCI function under the bridges `below`, which are made when they are new. Returns its folder."""
        for depth, bridge in enumerate(below):
            if not (self.path / "sys/bus/pci/devices" / bridge).exists():
                self.card(bridge, BRIDGE, below[:depth])
        at = "/".join(("sys/devices/pci0000:00", *below, address))
        vendor, class_id = kind
        for name, text in {"vendor": vendor, "class": class_id, **files}.items():
            self.write(f"{at}/{name}", text)
        self.link(f"sys/bus/pci/devices/{address}", at)
        return at

    def nic(
        self, name: str, card: str | None = "0000:41:00.0", *, below: tuple[str, ...] = (), **port: str
    ) -> None:
        """An RDMA device with one port. card None: a soft device over `netdev`."""
        at = f"sys/class/infiniband/{name}"
        self.write(f"{at}/node_type", port.pop("node_type", "1: CA"))
        vendor = port.pop("vendor", NIC[0])
        if card is None:
            self.write(f"{at}/parent", port.get("netdev", "lo"))
        else:
            self.link(f"{at}/device", self.card(card, (vendor, NIC[1]), below))
        self.port(name, 1, **port)

    def port(
        self,
        name: str,
        number: int,
        *,
        netdev: str = "eth0",
        mtu: str = "9000",
        state: str = "4: ACTIVE",
        phys_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        link_layer: str = "Ethernet",
        gids: str = f"{LINK_LOCAL} {ROCE_V1}, {MAPPED} {ROCE_V2}",
    ) -> None:
        at = f"sys/class/infiniband/{name}/ports/{number}"
        fields = {
            "state": state,
            "phys_state": phys_state,
            "rate": rate,
            "link_layer": link_layer,
            "lid": "0x0",
        }
        for field, text in fields.items():
            self.write(f"{at}/{field}", text)
        for index, gid in enumerate(filter(None, gids.split(", "))):
            value, _, kind = gid.partition(" ")
            self.write(f"{at}/gids/{index}", value)
            self.write(f"{at}/gid_attrs/types/{index}", kind)
            self.write(f"{at}/gid_attrs/ndevs/{index}", netdev)
        if netdev:
            self.write(f"sys/class/net/{netdev}/mtu", mtu)


def config_space(acs_control: int | None = None, size: int = 4096) -> bytes:
    """A PCI configuration space with advanced error reporting and, behind it, ACS; cut at `size` bytes."""
    space = bytearray(4096)
    behind = 0x148 if acs_control is not None else 0
    struct.pack_into("<I", space, 0x100, behind << 20 | 2 << 16 | 0x0001)
    if acs_control is not None:
        struct.pack_into("<IHH", space, 0x148, 1 << 16 | 0x000D, 0x5F, acs_control)
    return bytes(space[:size])


def bars(*sizes: int) -> str:
    """The file `resource` of a device with these memory BARs, each 64-bit."""
    lines = []
    for size in sizes:
        first = 1 << 40
        lines += [
            f"{first:#018x} {first + size - 1:#018x} 0x000000000014220c",
            f"{0:#018x} {0:#018x} {0:#018x}",
        ]
    return "\n".join(lines)
