# SPDX-License-Identifier: Apache-2.0
"""Selects NIC ports of this machine by its sysfs."""

from __future__ import annotations

from pathlib import Path

from kvlink.hardware.nics.choice import choose, weigh
from kvlink.hardware.nics.values import MemoryPlace, NicSelection, RefusedNic, port_and_mbps, port_name
from kvlink.hardware.topology import discover
from kvlink.nic_options import parse_nics


def select_nics(place: MemoryPlace, spec: str = "", root: Path = Path("/")) -> NicSelection:
    """Applies `choose` to this machine. Returns an empty selection if it has no RDMA device and `spec` is empty."""
    if not spec and not any((root / "sys/class/infiniband").glob("*")):
        return NicSelection((), ())
    return choose(discover(root), place, spec)


def select_ports(
    place: MemoryPlace, spec: str = "", root: Path = Path("/")
) -> tuple[list[tuple[str, int]], tuple[RefusedNic, ...]]:
    """Returns the selected ports with their weights in Mb/s, best first, and the refused ports."""
    wish = parse_nics(spec)
    if wish.ports and not wish.excludes and all(port is not None for _, port in wish.ports):
        names = [port_name(*named) for named in wish.ports]
        known = dict(map(port_and_mbps, weigh(discover(root, gids=False), place, names)))
        return [
            (name, known.get(name, 1)) for name in names
        ], ()  # no advice on paths for explicitly named ports
    selection = select_nics(place, spec, root)
    return [port_and_mbps(nic) for nic in selection.chosen], selection.refused
