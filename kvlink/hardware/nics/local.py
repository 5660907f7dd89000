# SPDX-License-Identifier: Apache-2.0
"""Selects NIC ports of this machine by its sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvlink.hardware.nics.choice import choose, weigh, wished
from kvlink.hardware.nics.values import MemoryPlace, NicSelection, RefusedNic, port_and_mbps, port_name
from kvlink.hardware.topology import discover


def select_nics(place: MemoryPlace, spec: str = "", root: Path = Path("/")) -> NicSelection:
    """Applies `choose` to this machine. Returns an empty selection if it has no RDMA device and `spec` is empty."""
    if not spec and not any((root / "sys/class/infiniband").glob("*")):
        return NicSelection((), ())
    return choose(discover(root), place, spec)


class PortSelection(NamedTuple):
    """The ports for one memory place."""

    ports: list[tuple[str, int]]
    """Names and weights in Mb/s, best first."""
    refused: tuple[RefusedNic, ...]
    warning: str = ""


def select_ports(place: MemoryPlace, spec: str = "", root: Path = Path("/")) -> PortSelection:
    """Returns the selected ports in the form that the core takes, and the refused ports."""
    wish = wished(spec, place)
    if wish.ports and not wish.excludes and all(port is not None for _, port in wish.ports):
        names = [port_name(*named) for named in wish.ports]
        known = dict(map(port_and_mbps, weigh(discover(root, gids=False), place, names)))
        # There is no advice on the paths of ports that the operator has named.
        return PortSelection([(name, known.get(name, 1)) for name in names], ())
    selection = select_nics(place, spec, root)
    return PortSelection(
        [port_and_mbps(nic) for nic in selection.chosen], selection.refused, selection.warning
    )
