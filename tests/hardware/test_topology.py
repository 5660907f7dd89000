# SPDX-License-Identifier: Apache-2.0
"""The topology of a machine: distances, and the devices that it knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hardware import machines
from hardware.machines import DOWN, LINK_LOCAL, Machine, Port, mapped

from kvlink.hardware.sysfs import parse_list, parse_size, read, read_field, read_int
from kvlink.hardware.topology import (
    CacheLevel,
    Distance,
    GidType,
    HugePages,
    LinkLayer,
    PciDevice,
    PortState,
    Topology,
    discover,
    distance,
    distance_to_node,
    normalize,
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def cpu(number: int, package: int, siblings: str, caches: list[tuple[int, str, str, str]]) -> dict[str, str]:
    at = f"sys/devices/system/cpu/cpu{number}"
    files = {
        f"{at}/topology/physical_package_id": str(package),
        f"{at}/topology/thread_siblings_list": siblings,
    }
    for index, (level, kind, size, shared) in enumerate(caches):
        files[f"{at}/cache/index{index}/level"] = str(level)
        files[f"{at}/cache/index{index}/type"] = kind
        files[f"{at}/cache/index{index}/size"] = size
        files[f"{at}/cache/index{index}/shared_cpu_list"] = shared
    return files


def node(
    number: int, cpus: str, memory_kib: int, free_kib: int, distance: str, huge: int = 0
) -> dict[str, str]:
    at = f"sys/devices/system/node/node{number}"
    return {
        f"{at}/cpulist": cpus,
        f"{at}/distance": distance,
        f"{at}/meminfo": (
            f"Node {number} MemTotal:       {memory_kib} kB\nNode {number} MemFree:        {free_kib} kB"
        ),
        f"{at}/hugepages/hugepages-2048kB/nr_hugepages": str(huge),
        f"{at}/hugepages/hugepages-2048kB/free_hugepages": str(huge // 2),
    }


@pytest.fixture
def small_vm(tmp_path: Path) -> Path:
    write(tmp_path, {"sys/devices/system/cpu/online": "0-1", "proc/cpuinfo": "model name\t: Tiny CPU"})
    for number in range(2):
        private = [(1, "Data", "32K", f"{number}"), (2, "Unified", "1024K", f"{number}")]
        write(tmp_path, cpu(number, 0, f"{number}", [*private, (3, "Unified", "32768K", "0-1")]))
    write(tmp_path, node(0, "0-1", 8 << 20, 4 << 20, "10"))
    write(tmp_path, {"sys/devices/system/node/has_cpu": "0", "sys/devices/system/cpu/cpufreq/x": ""})
    return tmp_path


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two sockets of two cores of two threads; CPU n and n+4 share a core; CPU 7 is offline."""
    write(tmp_path, {"sys/devices/system/cpu/online": "0-6", "proc/cpuinfo": "model name : Big CPU"})
    for number in range(7):
        core, socket = number % 4, number % 4 // 2
        siblings = f"{core},{core + 4}" if core != 3 else "3"
        l3 = "0-1,4-5" if socket == 0 else "2-3,6"
        write(
            tmp_path, cpu(number, socket, siblings, [(1, "Data", "48K", siblings), (3, "Unified", "2M", l3)])
        )
    write(tmp_path, node(0, "0-1,4-5", 64 << 20, 32 << 20, "10 21", huge=16))
    write(tmp_path, node(1, "2-3,6", 64 << 20, 16 << 20, "21 10"))
    return tmp_path


@pytest.fixture
def without_numa(tmp_path: Path) -> Path:
    write(
        tmp_path,
        {
            "sys/devices/system/cpu/online": "0-3",
            "proc/meminfo": "MemTotal:        4096 kB\nMemFree:         1024 kB",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "3",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "1",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0",
        },
    )
    return tmp_path


def test_a_small_vm(small_vm: Path) -> None:
    found = discover(small_vm)
    assert (found.cpu_model, found.num_sockets, found.num_cores, found.num_threads) == ("Tiny CPU", 1, 2, 2)
    assert found.caches == (
        CacheLevel(1, "Data", 32 << 10, num=2, num_threads=1),
        CacheLevel(2, "Unified", 1 << 20, num=2, num_threads=1),
        CacheLevel(3, "Unified", 32 << 20, num=1, num_threads=2),
    )
    (only,) = found.nodes
    assert (only.cpus, only.memory_bytes, only.free_bytes) == ((0, 1), 8 << 30, 4 << 30)


def test_two_sockets(two_sockets: Path) -> None:
    found = discover(two_sockets)
    assert (found.num_sockets, found.num_cores, found.num_threads) == (2, 4, 7)
    first, second = found.nodes
    assert (first.id, first.cpus, first.distances) == (0, (0, 1, 4, 5), (10, 21))
    assert first.huge_pages == (HugePages(2 << 20, num=16, num_free=8),)
    assert (second.id, second.cpus, second.free_bytes) == (1, (2, 3, 6), 16 << 30)
    assert {(c.level, c.num, c.num_threads) for c in found.caches} == {
        (1, 3, 2), (1, 1, 1), (3, 1, 4), (3, 1, 3),
    }  # fmt: skip


def test_a_kernel_without_numa_is_one_node(without_numa: Path) -> None:
    found = discover(without_numa)
    assert (found.num_sockets, found.num_cores, found.cpu_model) == (1, 4, "unknown")
    (only,) = found.nodes
    assert (only.id, only.cpus, only.memory_bytes, only.free_bytes) == (0, (0, 1, 2, 3), 4 << 20, 1 << 20)
    assert [(pages.page_bytes, pages.num, pages.num_free) for pages in only.huge_pages] == [
        (2 << 20, 3, 1),
        (1 << 30, 0, 0),
    ]


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    found = discover(tmp_path)
    assert (found.num_sockets, found.num_cores, found.num_threads, found.caches) == (1, 0, 0, ())


def test_this_machine_has_what_it_runs_on() -> None:
    found = discover()
    assert 1 <= found.num_sockets <= found.num_cores <= found.num_threads
    assert sum(node.memory_bytes for node in found.nodes) > 0


def test_kernel_formats() -> None:
    assert parse_list("0-2,8") == (0, 1, 2, 8)
    assert parse_list("") == ()
    assert [parse_size(text) for text in ("32K", "16384 kB", "2M", "1G", "17", "")] == [
        32 << 10, 16 << 20, 2 << 20, 1 << 30, 17, 0,
    ]  # fmt: skip


def test_absent_files_read_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a: 1\nwords\n")
    assert read(tmp_path, "nowhere") == ""
    assert read(tmp_path, ".") == ""
    assert read_int(tmp_path, "nowhere") is None
    assert read_int(tmp_path, "text") is None
    assert read_field(tmp_path, "text", "a") == "1"
    assert read_field(tmp_path, "text", "words") == ""


LOC, PIX, PXB, PHB, NODE, SYS, DIS = Distance


def matrix(topology: Topology) -> list[str]:
    """A row a GPU, a column a NIC."""
    return [" ".join(distance(gpu, nic.pci).name for nic in topology.nics) for gpu in topology.gpus]


def test_dgx_h100(tmp_path: Path) -> None:
    found = machines.dgx_h100(tmp_path).discover()
    assert [nic.name for nic in found.nics] == [f"mlx5_{number}" for number in range(12)]
    assert matrix(found) == [
        "PXB NODE NODE NODE NODE NODE SYS SYS SYS SYS SYS SYS",
        "NODE NODE NODE PXB NODE NODE SYS SYS SYS SYS SYS SYS",
        "NODE NODE NODE NODE PXB NODE SYS SYS SYS SYS SYS SYS",
        "NODE NODE NODE NODE NODE PXB SYS SYS SYS SYS SYS SYS",
        "SYS SYS SYS SYS SYS SYS PXB NODE NODE NODE NODE NODE",
        "SYS SYS SYS SYS SYS SYS NODE NODE NODE PXB NODE NODE",
        "SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE PXB NODE",
        "SYS SYS SYS SYS SYS SYS NODE NODE NODE NODE NODE PXB",
    ]
    assert distance(found.nics[1].pci, found.nics[2].pci) is LOC
    assert distance(found.nics[2].pci, found.nics[7].pci) is SYS


def test_hgx_h100(tmp_path: Path) -> None:
    assert matrix(machines.hgx_h100(tmp_path).discover()) == [
        "PIX NODE NODE NODE SYS SYS SYS SYS NODE",
        "NODE PIX NODE NODE SYS SYS SYS SYS NODE",
        "NODE NODE PIX NODE SYS SYS SYS SYS NODE",
        "NODE NODE NODE PIX SYS SYS SYS SYS NODE",
        "SYS SYS SYS SYS PIX NODE NODE NODE SYS",
        "SYS SYS SYS SYS NODE PIX NODE NODE SYS",
        "SYS SYS SYS SYS NODE NODE PIX NODE SYS",
        "SYS SYS SYS SYS NODE NODE NODE PIX SYS",
    ]


def test_one_nic_for_two_gpus(tmp_path: Path) -> None:
    found = machines.hgx_pairs(tmp_path).discover()
    assert matrix(found) == [
        *["PIX NODE SYS SYS"] * 2,
        *["NODE PIX SYS SYS"] * 2,
        *["SYS SYS PIX NODE"] * 2,
        *["SYS SYS NODE PIX"] * 2,
    ]
    assert [distance(found.gpus[0], gpu) for gpu in found.gpus[:4]] == [LOC, PIX, NODE, NODE]


def test_a_cloud_vm_without_numa_nodes(tmp_path: Path) -> None:
    found = machines.cloud_vm(tmp_path).discover()
    assert matrix(found) == ["PHB PHB", "PHB PHB"]
    assert {device.numa_node for device in found.gpus} == {0}
    assert [nic.pci.link_gbps for nic in found.nics if nic.pci] == [0, 0]


def test_unknown_nodes_stay_unknown_where_there_are_several(tmp_path: Path) -> None:
    found = machines.cloud_vm(tmp_path, num_nodes=2).discover()
    assert matrix(found) == ["PHB PHB", "PHB PHB"]  # one host bridge
    assert {device.numa_node for device in found.gpus} == {None}
    assert distance_to_node(found.gpus[0], 0) is SYS


def test_machines_without_gpus_or_nics(tmp_path: Path) -> None:
    found = machines.cpu_server(tmp_path / "server").discover()
    assert (found.gpus, matrix(found)) == ((), [])
    assert [distance_to_node(nic.pci, node) for nic in found.nics for node in (0, 1)] == [PHB, SYS, SYS, PHB]
    nothing = discover(tmp_path / "nothing")
    assert (nothing.gpus, nothing.nics) == ((), ())


def test_soft_devices_have_no_path_to_a_gpu(tmp_path: Path) -> None:
    found = machines.only_soft(tmp_path).discover()
    assert [(nic.name, nic.pci, nic.ports[0].netdev) for nic in found.nics] == [
        ("rxe0", None, "lo"),
        ("rxe1", None, "veth0"),
    ]
    assert matrix(found) == ["DIS DIS"]
    assert distance_to_node(None, 0) is DIS


def test_a_soft_device_is_not_the_card_it_rides_on(tmp_path: Path) -> None:
    """Older kernels link an rxe device to its interface's card."""
    machine = machines.cpu_server(tmp_path)
    card = next(tmp_path.glob("sys/devices/pci*/*/*/net/eth0")).parents[1]
    machine.soft("rxe0", "eth0")
    machine.link("sys/devices/virtual/infiniband/rxe0/device", str(card.relative_to(tmp_path)))
    assert machine.discover().nics[-1].pci is None


def at(*path: str, node: int | None = 0) -> PciDevice:
    return PciDevice(path[-1], path, 0, 0, 0, node, 0.0, 0)


ROOT, OTHER_ROOT = "pci0000:00", "pci0000:80"
PORT, UP = "0000:00:01.0", "0000:01:00.0"
FAR = at(ROOT, PORT, UP, "0000:02:00.0", "0000:03:00.0", "0000:04:00.0", "0000:05:00.0")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (at(ROOT, "0000:00:02.0"), at(ROOT, "0000:00:02.1"), LOC),
        (at(ROOT, "0000:00:02.0"), at(ROOT, "0000:00:03.0"), PHB),
        (at(ROOT, PORT, "0000:09:00.0"), at(ROOT, PORT, "0000:09:01.0"), PIX),
        (
            at(ROOT, PORT, UP, "0000:02:00.0", "0000:03:00.0"),
            at(ROOT, PORT, UP, "0000:02:01.0", "0000:06:00.0"),
            PIX,
        ),
        (FAR, at(ROOT, PORT, UP, "0000:02:01.0", "0000:06:00.0"), PXB),
        (FAR, at(ROOT, "0000:00:03.0", "0000:09:00.0"), PHB),
        (FAR, at(OTHER_ROOT, "0000:80:01.0"), NODE),
        (FAR, at(OTHER_ROOT, "0000:80:01.0", node=1), SYS),
        (FAR, at(OTHER_ROOT, "0000:80:01.0", node=None), SYS),
        (at(ROOT, "0000:00:02.0", node=None), at(ROOT, "0000:00:03.0", node=None), PHB),
        (FAR, None, DIS),
    ],
)
def test_distances(a: PciDevice, b: PciDevice | None, expected: Distance) -> None:
    assert (distance(a, b), distance(b, a)) == (expected, expected)


def test_what_a_port_says(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.nic("mlx5_0", "", 0, Port(400), Port(100, "Ethernet", netdev="eth1"))
    (nic,) = machine.discover().nics
    one, two = nic.ports
    assert (nic.firmware, nic.node_guid, nic.is_iwarp) == ("28.39.1002", "b83f:d203:006a:e616", False)
    assert (one.state, one.phys_state, one.link_layer) == (PortState.ACTIVE, "LinkUp", LinkLayer.INFINIBAND)
    assert (one.rate_gbps, one.lid, one.netdev) == (400, 0x11, "")
    assert (two.number, two.rate_gbps, two.lid, two.netdev) == (2, 100, 0, "eth1")
    assert [(gid.index, str(gid.address), gid.kind) for gid in two.gids] == [
        (0, "fe80::a3f:d2ff:fe06:1", GidType.IB_OR_ROCE_V1),
        (1, "fe80::a3f:d2ff:fe06:1", GidType.ROCE_V2),
        (2, "10.0.2.1", GidType.IB_OR_ROCE_V1),
        (3, "10.0.2.1", GidType.ROCE_V2),
    ]
    assert two.gids[3].value == mapped("10.0.2.1")


def test_a_port_that_is_down_still_has_its_interface(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    down = Port(layer="Ethernet", state="1: DOWN", phys="3: Disabled", gids=[])
    folder = machine.nic("mlx5_0", "", 0, down, down)
    machine.write(f"{folder}/net/eth7/dev_port", "1")
    first, second = machine.discover().nics[0].ports
    assert (first.state, first.phys_state, first.gids) == (PortState.DOWN, "Disabled", ())
    assert (first.netdev, second.netdev) == ("", "eth7")


def test_slots(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    at = machine.nic("mlx5_0", "", 0)
    for speed, lanes, gbps in (
        ("16.0 GT/s PCIe", "16", 252),
        ("5.0 GT/s PCIe", "8", 32),
        ("Unknown", "255", 0),
    ):
        machine.write(f"{at}/current_link_speed", speed)
        machine.write(f"{at}/current_link_width", lanes)
        (nic,) = machine.discover().nics
        assert nic.pci is not None
        assert nic.pci.link_gbps == pytest.approx(gbps, abs=0.1)


def test_virtual_functions(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    port = machine.root_port(0)
    own = machine.nic("mlx5_0", port, 0, slot="0000:3b:00.0")
    virtual = machine.nic("mlx5_1", port, 0, slot="0000:3b:00.2")
    machine.link(f"{own}/virtfn0", virtual)
    machine.link(f"{virtual}/physfn", own)
    first, second = (nic.pci for nic in machine.discover().nics)
    assert first is not None
    assert second is not None
    assert (first.virtual_functions, first.physical_function) == (("0000:3b:00.2",), "")
    assert (second.virtual_functions, second.physical_function) == ((), "0000:3b:00.0")
    assert distance(first, second) is LOC


GARBAGE: list[Callable[[Machine, str], None]] = [
    lambda machine, at: machine.write(f"{at}/ports/1/state", "?"),
    lambda machine, at: machine.write(f"{at}/ports/1/rate", "fast"),
    lambda machine, at: machine.write(f"{at}/ports/1/lid", "0xyz"),
    lambda machine, at: machine.write(f"{at}/ports/1/link_layer", "Token Ring"),
    lambda machine, at: machine.write(f"{at}/ports/1/gids/0", "no address"),
    lambda machine, at: machine.write(f"{at}/ports/one/state", "4: ACTIVE"),
    lambda machine, at: (tmp := machine.root / at / "device").unlink() or tmp.symlink_to("nowhere"),
]


@pytest.mark.parametrize("spoil", GARBAGE)
def test_files_of_unknown_contents_are_no_error(
    tmp_path: Path, spoil: Callable[[Machine, str], None]
) -> None:
    machine = Machine(tmp_path)
    machine.nic("mlx5_0", "", 0, Port(gids=[(LINK_LOCAL, "RoCE v9")]))
    spoil(machine, "sys/class/infiniband/mlx5_0")
    (nic,) = machine.discover().nics
    assert [port.number for port in nic.ports] == [1]


def test_a_foreign_gid_type_is_unknown(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.nic("mlx5_0", "", 0, Port(gids=[(LINK_LOCAL, "RoCE v9")]), DOWN)
    assert machine.discover().nics[0].ports[0].gids[0].kind is GidType.UNKNOWN


@pytest.mark.parametrize("text", ["0000:1b:00.0", "00000000:1B:00.0", " 0:1b:00.0"])
def test_addresses_in_other_spellings(text: str) -> None:
    assert normalize(text) == "0000:1b:00.0"
    assert normalize("00010000:E1:00.0") == "10000:e1:00.0"
