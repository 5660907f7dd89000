# SPDX-License-Identifier: Apache-2.0
"""Shows the machine: processors, NICs, their distance to each GPU and NUMA node, and which NICs are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvlink.cli.tables import Fitted, make_console, plain_table, print_json
from kvlink.hardware.device_caps import VerbsReport, query
from kvlink.hardware.nics import MemoryPlace, NicSelection, RefusedNic, best_gid, choose, port_name
from kvlink.hardware.topology import (
    Distance,
    NumaNode,
    RdmaDevice,
    Topology,
    discover,
    distance,
    distance_to_node,
)

_FIRST = (
    "port",
    "memory",
    "uses",
    "state",
    "link",
    "Gb/s",
    "node",
    "slot Gb/s",
    "GID",
    "address",
    "type",
    "",
)
_UNSEEN = "NVLink and C2C are not in sysfs, so this table omits them; `nvidia-smi topo -m` shows them."


@dataclass(frozen=True, slots=True)
class _Place:
    """One row of the matrix: a GPU or a NUMA node."""

    name: str
    distances: tuple[Distance, ...]
    """The distance to each NIC, in the order of NICs."""
    selection: NicSelection


def show(spec: str, as_json: bool, root: Path = Path("/"), gid: str = "") -> None:
    """Shows the topology. `spec` and `gid` are the texts of KVLINK_NICS and KVLINK_RDMA_GID.

    Raises ConfigError if `spec` does not fit this machine.
    """
    topology = discover(root)
    places = list(_places(topology, spec))
    verbs = query(topology.nics)
    if as_json:
        print_json(_as_json(topology, places, verbs))
        return
    console = make_console()
    console.print(_processors(topology), soft_wrap=True)
    console.print(Fitted(_numa_table(topology.nodes)))
    if not topology.nics:
        console.print(
            "\nno RDMA device: /sys/class/infiniband is empty or absent (`kvlink doctor` gives details)"
        )
        return
    for table in (_nic_table(topology.nics), _gid_table(topology.nics, gid), _matrix(topology.nics, places)):
        console.print("", Fitted(table, _FIRST), sep="\n")
    for line in _notes(topology, places):
        console.print(f"  {escape(line)}", soft_wrap=True)
    if verbs.caps:
        console.print("", Fitted(_caps_table(verbs)), sep="\n")
    if verbs.problem:
        console.print(f"\nlimits of devices are unknown: {escape(verbs.problem)}", soft_wrap=True)
        console.print(f"  [dim]fix:[/] {escape(verbs.fix)}", soft_wrap=True)


def _places(topology: Topology, spec: str) -> Iterator[_Place]:
    for gpu in topology.gpus:
        paths = tuple(distance(gpu, nic.pci) for nic in topology.nics)
        yield _Place(f"GPU {gpu.address}", paths, choose(topology, MemoryPlace(gpu=gpu.address), spec))
    for node in topology.nodes:
        paths = tuple(distance_to_node(nic.pci, node.id) for nic in topology.nics)
        yield _Place(f"node {node.id}", paths, choose(topology, MemoryPlace(numa_node=node.id), spec))


def _as_json(topology: Topology, places: Sequence[_Place], verbs: VerbsReport) -> dict[str, Any]:
    names = [nic.name for nic in topology.nics]
    rows = [
        {
            "place": place.name,
            "distances": dict(zip(names, place.distances, strict=True)),
            **asdict(place.selection),
        }
        for place in places
    ]
    plain: dict[str, Any] = _plain({**asdict(topology), "places": rows, "verbs": asdict(verbs)})
    return plain


def _plain(value: Any) -> Any:
    """Replaces enums by their readable names."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _processors(topology: Topology) -> str:
    lines = [
        f"[bold]{escape(topology.cpu_model)}[/]: {topology.num_sockets} socket(s), "
        f"{topology.num_cores} cores, {topology.num_threads} threads"
    ]
    for cache in topology.caches:
        shared = f" for {cache.num_threads} threads" if cache.num_threads > 1 else ""
        lines.append(f"  L{cache.level} {cache.kind.lower()}: {cache.num} × {_size(cache.bytes)}{shared}")
    return "\n".join(lines)


def _numa_table(nodes: Sequence[NumaNode]) -> Table:
    table = plain_table("node", "cpus", "memory", "free", "huge pages", "distances")
    for node in nodes:
        huge = [
            f"{each.num_free}/{each.num} × {_size(each.page_bytes)}" for each in node.huge_pages if each.num
        ]
        sizes = (_size(node.memory_bytes), _size(node.free_bytes))
        costs = " ".join(map(str, node.distances))
        table.add_row(str(node.id), _ranges(node.cpus), *sizes, ", ".join(huge) or "none reserved", costs)
    return table


def _nic_table(nics: Sequence[RdmaDevice]) -> Table:
    table = plain_table(
        "port", "state", "link", "Gb/s", "netdev", "PCI", "slot Gb/s", "node", "kind", "firmware"
    )
    for nic in nics:
        slot = f"{nic.pci.link_gbps:.0f}" if nic.pci and nic.pci.link_gbps else "unknown"
        where = (nic.pci.address, slot, _or_unknown(nic.pci.numa_node)) if nic.pci else ("virtual", "", "")
        kind = (
            "virtual function"
            if nic.pci and nic.pci.physical_function
            else "EFA"
            if nic.is_efa
            else "iWARP"
            if nic.is_iwarp
            else nic.hca_type
        )
        for port in nic.ports:
            link = (port.state.name, port.link_layer.value, f"{port.rate_gbps:g}", port.netdev)
            table.add_row(port_name(nic.name, port.number), *link, *where, kind, nic.firmware)
    return table


def _gid_table(nics: Sequence[RdmaDevice], wanted: str) -> Table:
    table = plain_table("port", "GID", "address", "type", "netdev", "")
    for nic in nics:
        for port in nic.ports:
            best = best_gid(nic, port, wanted)
            for gid in port.gids:
                use = "used" if gid is best else ""
                row = (str(gid.index), str(gid.address), gid.kind.value, gid.netdev, use)
                table.add_row(port_name(nic.name, port.number), *row)
    return table


def _matrix(nics: Sequence[RdmaDevice], places: Sequence[_Place]) -> Table:
    table = plain_table("memory", *(nic.name for nic in nics), "uses")
    for place in places:
        uses = ", ".join(port_name(nic.device, nic.port) for nic in place.selection.chosen)
        table.add_row(place.name, *(path.name for path in place.distances), uses or "none")
    return table


def _notes(topology: Topology, places: Sequence[_Place]) -> Iterator[str]:
    """Yields every reason of a place that has no NIC; of other places only faults of ports and warnings."""
    for place in places:
        if place.selection.warning:
            yield place.selection.warning
        if not place.selection.chosen:
            for refusal in place.selection.refused:
                yield f"{place.name}: {refusal}"
    broken = {refusal: None for place in places for refusal in place.selection.refused if _is_fault(refusal)}
    yield from map(str, broken)
    if topology.gpus:
        yield _UNSEEN


def _is_fault(refusal: RefusedNic) -> bool:
    return refusal.reason.startswith(("is DOWN", "is INIT", "is ARMED", "has no "))


def _caps_table(verbs: VerbsReport) -> Table:
    table = plain_table(
        "device",
        "reads in",
        "reads out",
        "sge",
        "sge of a read",
        "largest region",
        "atomics",
        "windows",
        "ODP reads",
        "MTU",
    )
    for caps in verbs.caps:
        limits = (caps.max_qp_rd_atom, caps.max_qp_init_rd_atom, caps.max_sge, caps.max_sge_rd)
        able = ("yes" if has else "no" for has in (caps.has_memory_windows, caps.has_odp_read))
        mtu = " ".join(map(str, caps.active_mtu_bytes))
        table.add_row(caps.device, *map(str, limits), _size(caps.max_mr_bytes), caps.atomics, *able, mtu)
    return table


def _or_unknown(node: int | None) -> str:
    return "unknown" if node is None else str(node)


def _ranges(numbers: Sequence[int]) -> str:
    """Returns numbers in the kernel's list format: (0, 1, 2, 8) is "0-2,8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _size(num_bytes: int) -> str:
    for unit, shift in (("EiB", 60), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):.4g} {unit}"
    return f"{num_bytes} bytes"
