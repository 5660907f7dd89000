# SPDX-License-Identifier: Apache-2.0
"""The choice for this machine, from its sysfs."""

from __future__ import annotations

from pathlib import Path

from kvlink.config import parse_nics
from kvlink.nics.choice import choose
from kvlink.nics.values import MemoryPlace, NicSelection, RefusedNic, port_name
from kvlink.topology import discover


def select_nics(place: MemoryPlace, spec: str = "", root: Path = Path("/")) -> NicSelection:
    """What `choose` says of this machine now; nothing chosen when it has no RDMA device and `spec` names none."""
    if not spec and not any((root / "sys/class/infiniband").glob("*")):
        return NicSelection((), ())
    return choose(discover(root), place, spec)


def select_ports(
    place: MemoryPlace, spec: str = "", root: Path = Path("/")
) -> tuple[list[str], tuple[RefusedNic, ...]]:
    """The chosen ports as csrc/verbs_nic.h takes them, best first, and the ports left out."""
    wish = parse_nics(spec)
    if wish.ports and not wish.excludes and all(port is not None for _, port in wish.ports):
        return [port_name(*named) for named in wish.ports], ()  # who names ports is not advised on paths
    selection = select_nics(place, spec, root)
    return [port_name(nic.device, nic.port) for nic in selection.chosen], selection.refused
