# SPDX-License-Identifier: Apache-2.0
"""NICs: what sysfs says of them and of their ports, and which GPUs they reach."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from descriptors import descriptors, opened_since
from hardware import machines
from hardware.fake_cuda import HOPPER, FakeCuda, at
from hardware.fake_root import GPU, FakeRoot, bars
from hardware.machines import DOWN, ETHERNET, GLOBAL_IPV6, LINK_LOCAL, ROCE_V1, ROCE_V2, Machine, Port, mapped
from hypothesis import given
from hypothesis import strategies as st

from kvlink.config.rdma_config import Way, parse_ways
from kvlink.errors import ConfigError, TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver, Decision, Facts, Kind, Ordering, decide, export, inspect
from kvlink.hardware.gpudirect.export import whole_pages
from kvlink.hardware.nics import MemoryPlace, NicSelection, best_gid, choose, select_ports, weigh
from kvlink.hardware.topology import Distance, LinkLayer, Topology, discover


def chosen(topology: Topology, place: MemoryPlace, spec: str = "") -> list[str]:
    return [f"{nic.device}:{nic.port}" for nic in choose(topology, place, spec).chosen]


def reasons(selection: NicSelection) -> dict[str, str]:
    return {f"{refused.device}:{refused.port}": str(refused) for refused in selection.refused}


def of_gpus(topology: Topology, spec: str = "") -> list[list[str]]:
    return [chosen(topology, MemoryPlace(gpu=gpu.address), spec) for gpu in topology.gpus]


def test_every_gpu_of_a_dgx_h100_has_its_nic(tmp_path: Path) -> None:
    found = machines.dgx_h100(tmp_path).discover()
    assert of_gpus(found) == [[f"mlx5_{number}:1"] for number in (0, 3, 4, 5, 6, 9, 10, 11)]
    selection = choose(found, MemoryPlace(gpu=found.gpus[0].address))
    assert [(nic.distance, nic.weight) for nic in selection.chosen] == [(Distance.PXB, 400)]
    refused = reasons(selection)
    assert len(refused) == 11
    assert "mlx5_1:1 is NODE, farther than mlx5_0:1 (PXB)" in refused["mlx5_1:1"]
    assert "set KVLINK_NICS=mlx5_0:1,mlx5_1:1" in refused["mlx5_1:1"]
    assert selection.warning == ""


def test_host_memory_uses_the_nics_of_its_node(tmp_path: Path) -> None:
    found = machines.hgx_h100(tmp_path).discover()
    assert chosen(found, MemoryPlace(numa_node=1)) == ["mlx5_4:1", "mlx5_5:1", "mlx5_6:1", "mlx5_7:1"]
    selection = choose(found, MemoryPlace(numa_node=0))
    assert [nic.device for nic in selection.chosen] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert "is slow: 25 Gb/s where mlx5_0:1 has 400" in reasons(selection)["mlx5_8:1"]
    assert "is SYS, farther than mlx5_0:1 (PHB)" in reasons(selection)["mlx5_4:1"]


def test_host_memory_of_an_unknown_node_uses_all_alike(tmp_path: Path) -> None:
    found = machines.cpu_server(tmp_path).discover()
    selection = choose(found, MemoryPlace())
    assert [(nic.device, nic.distance) for nic in selection.chosen] == [
        ("mlx5_0", Distance.SYS),
        ("mlx5_1", Distance.SYS),
    ]
    assert len({nic.weight for nic in selection.chosen}) == 1


def test_a_node_without_nics_uses_those_of_the_next_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path, num_nodes=3)
    for node, costs in enumerate(("10 12 21", "12 10 21", "21 21 10")):
        machine.write(f"sys/devices/system/node/node{node}/distance", costs)
    machine.nic("mlx5_0", "", 1)
    machine.nic("mlx5_1", "", 2)
    machine.nic("mlx5_2", "", -1)
    found = machine.discover()
    assert [chosen(found, MemoryPlace(numa_node=node)) for node in range(3)] == [
        ["mlx5_0:1"],
        ["mlx5_0:1"],
        ["mlx5_1:1"],
    ]


def test_two_gpus_share_a_nic(tmp_path: Path) -> None:
    found = machines.hgx_pairs(tmp_path).discover()
    assert of_gpus(found) == [[f"mlx5_{gpu // 2}:1"] for gpu in range(8)]


def test_a_nearer_switch_wins_and_equal_ones_share(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    gpu, near, also_near, cascade = machine.switch(machine.root_port(0), 0, 4)
    machine.gpu(gpu, 0)
    machine.nic("mlx5_0", machine.switch(cascade, 0, 1)[0], 0)
    machine.nic("mlx5_1", near, 0)
    machine.nic("mlx5_2", also_near, 0, Port(200))
    found = machine.discover()
    selection = choose(found, MemoryPlace(gpu=found.gpus[0].address))
    assert [(nic.device, nic.distance.name, nic.weight) for nic in selection.chosen] == [
        ("mlx5_1", "PIX", 400),
        ("mlx5_2", "PIX", 200),
    ]
    assert "is PXB, farther than mlx5_1:1 (PIX)" in reasons(selection)["mlx5_0:1"]


def test_a_vm_that_hides_its_switches_pairs_by_pci_order(tmp_path: Path) -> None:
    found = machines.cloud_vm(tmp_path).discover()
    assert of_gpus(found) == [["mlx5_0:1"], ["mlx5_1:1"]]
    assert of_gpus(found, "mlx5_1") == [["mlx5_1:1"], ["mlx5_1:1"]]
    assert of_gpus(found, "^mlx5_0") == [["mlx5_1:1"], ["mlx5_1:1"]]
    assert chosen(found, MemoryPlace(numa_node=0)) == ["mlx5_0:1", "mlx5_1:1"]
    selection = choose(found, MemoryPlace(gpu=found.gpus[0].address))
    assert "mlx5_1:1 is paired with another of the 2 GPUs" in reasons(selection)["mlx5_1:1"]
    assert selection.warning.startswith(
        f"mlx5_0:1 is PHB from GPU {found.gpus[0].address}: bytes pass through the CPU"
    )


@pytest.mark.parametrize(
    ("machine", "expected", "apart", "share"),
    [
        ("dgx_h100", "0 3 4 5 6 9 10 11", "PXB", 1.0),
        ("hgx_h100", "0 1 2 3 4 5 6 7", "PIX", 1.0),
        ("hgx_pairs", "0 0 1 1 2 2 3 3", "PIX", 1.0),
        ("gcp_a3_ultra", "0 1 2 3 4 5 6 7", "PIX", 1.0),
        ("gb200_nvl72", "0 1 2 3", "NODE", 1.0),
        ("gh200", "0+1", "NODE", 1.0),
        ("l40s_box", "0 0 1 1", "NODE", 0.5),
        ("azure_nd", "7 6 5 4 3 2 1 0", "NODE", 0.5),
        ("cloud_vm", "0 1", "PHB", 0.5),
        ("aws_p5", "- - - - - - - -", "", 0.0),
    ],
)
def test_nics_of_the_gpus_of_published_machines(
    tmp_path: Path, machine: str, expected: str, apart: str, share: float
) -> None:
    found = getattr(machines, machine)(tmp_path).discover()
    selections = [choose(found, MemoryPlace(gpu=gpu.address)) for gpu in found.gpus]
    names = ["+".join(nic.device.removeprefix("mlx5_") for nic in each.chosen) or "-" for each in selections]
    assert " ".join(names) == expected
    for selection in selections:
        assert {nic.distance.name for nic in selection.chosen} <= {apart}
        assert {nic.weight / nic.rate_gbps for nic in selection.chosen} <= {share}
        assert bool(selection.warning) == (share == 0.5)


def test_a_gpu_without_a_near_nic_uses_one_of_the_other_node(tmp_path: Path) -> None:
    machine = Machine(tmp_path, num_nodes=2)
    for node in range(2):
        machine.gpu(machine.root_port(node), node)
    machine.nic("mlx5_0", machine.root_port(0), 0)
    found = machine.discover()
    assert of_gpus(found) == [["mlx5_0:1"], ["mlx5_0:1"]]
    near, far = (choose(found, MemoryPlace(gpu=gpu.address)) for gpu in found.gpus)
    assert [(nic.distance.name, nic.weight) for nic in (*near.chosen, *far.chosen)] == [
        ("NODE", 200),
        ("SYS", 100),
    ]


def test_elastic_fabric_adapters_are_refused_by_name(tmp_path: Path) -> None:
    found = machines.aws_p5(tmp_path).discover()
    selection = choose(found, MemoryPlace(numa_node=0))
    assert selection.chosen == ()
    assert {str(nic).partition(" ")[2] for nic in selection.refused} == {
        "is an Elastic Fabric Adapter (EFA), which has no reliable connections"
    }


def test_bounced_bytes_use_the_nics_of_the_gpus_node(tmp_path: Path) -> None:
    machine = machines.azure_nd(tmp_path)
    machine.soft("rxe0", "lo")
    found = machine.discover()
    place = MemoryPlace(gpu=found.gpus[5].address, bounced=True)
    assert chosen(found, place) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1", "mlx5_3:1"]
    only = machines.only_soft(tmp_path / "soft").discover()
    assert chosen(only, MemoryPlace(gpu=only.gpus[0].address, bounced=True)) == ["rxe0:1", "rxe1:1"]


def test_the_operator_s_list_of_one_gpu(tmp_path: Path) -> None:
    found = machines.azure_nd(tmp_path).discover()
    first, second = (gpu.address for gpu in found.gpus[:2])
    spec = f"0000{first.upper()}=mlx5_1,mlx5_2;{second}=^mlx5_7"
    assert of_gpus(found, spec)[:3] == [
        ["mlx5_1:1", "mlx5_2:1"],
        ["mlx5_4:1", "mlx5_5:1", "mlx5_6:1"],
        ["mlx5_6:1", "mlx5_7:1"],
    ]
    assert of_gpus(found, f"mlx5_5;{first}=mlx5_1")[:3] == [["mlx5_1:1"], ["mlx5_5:1"], ["mlx5_5:1"]]
    assert chosen(found, MemoryPlace(numa_node=1), spec) == chosen(found, MemoryPlace(numa_node=1))


def test_soft_devices_serve_host_memory_only(tmp_path: Path) -> None:
    machine = machines.only_soft(tmp_path)
    found = machine.discover()
    assert chosen(found, MemoryPlace(numa_node=0)) == ["rxe0:1", "rxe1:1"]
    assert of_gpus(found) == of_gpus(found, "rxe0") == [[]]
    machine.nic("mlx5_0", "", 0, ETHERNET)
    assert chosen(machine.discover(), MemoryPlace(numa_node=0)) == ["mlx5_0:1"]


def test_no_nic_at_all(tmp_path: Path) -> None:
    nothing = Machine(tmp_path).discover()
    assert choose(nothing, MemoryPlace()) == NicSelection((), ())
    with pytest.raises(ConfigError, match="this machine has no RDMA device"):
        choose(nothing, MemoryPlace(), "mlx5_0")


def test_a_slot_bounds_the_ports_of_its_card(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    at = machine.nic("mlx5_0", "", 0, Port(200), Port(200))
    machine.write(f"{at}/current_link_speed", "16.0 GT/s PCIe")
    for nic in choose(machine.discover(), MemoryPlace(numa_node=0)).chosen:
        assert nic.rate_gbps == 200
        assert nic.weight == pytest.approx(
            126 / 2, abs=0.1
        )  # half of the slot, and half of that through the CPU


@pytest.fixture
def three(tmp_path: Path) -> Topology:
    """mlx5_0 near node 0, mlx5_1 far, mlx5_10 near with its first port down."""
    machine = Machine(tmp_path, num_nodes=2)
    machine.nic("mlx5_0", "", 0)
    machine.nic("mlx5_1", "", 1)
    machine.nic("mlx5_10", "", 0, DOWN, Port())
    return machine.discover()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", ["mlx5_0:1", "mlx5_10:2"]),
        ("mlx5_1", ["mlx5_1:1"]),
        ("mlx5_1:1", ["mlx5_1:1"]),
        ("mlx5_1,mlx5_0:1,mlx5_0", ["mlx5_1:1", "mlx5_0:1"]),
        ("mlx5_10", ["mlx5_10:2"]),
        ("mlx5_10:2", ["mlx5_10:2"]),
        ("^mlx5_0", ["mlx5_10:2"]),
        ("^mlx5_10", ["mlx5_0:1"]),
        ("^mlx5_10:1", ["mlx5_0:1", "mlx5_10:2"]),
        ("^mlx5_0,mlx5_10", ["mlx5_1:1"]),
    ],
)
def test_the_operator_s_list(three: Topology, spec: str, expected: list[str]) -> None:
    place = MemoryPlace(numa_node=0)
    assert chosen(three, place, spec) == expected
    assert len(choose(three, place, spec).refused) == 4 - len(expected)


def test_named_distances_mix_with_their_weights(three: Topology) -> None:
    near, far = choose(three, MemoryPlace(numa_node=0), "mlx5_0,mlx5_1").chosen
    assert (near.weight, far.weight) == (200, 100)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            "mlx5_2",
            "names mlx5_2, which does not exist: this machine has mlx5_0:1, mlx5_1:1, mlx5_10:1, mlx5_10:2",
        ),
        ("mlx5_0:2", "names mlx5_0:2, which does not exist: this machine has mlx5_0:1"),
        ("^mlx5_2", "names mlx5_2, which does not exist"),
        ("mlx5", "names mlx5, which does not exist"),
        ("mlx5_0,mlx5_10:1", "names mlx5_10:1, but mlx5_10:1 is DOWN"),
        ("^mlx5_0,mlx5_1,mlx5_10", "excludes every NIC"),
        ("mlx5_0;mlx5_1", "must have one list for each GPU"),
    ],
)
def test_lists_that_do_not_fit_the_machine(three: Topology, spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(three, MemoryPlace(numa_node=0), spec)


def test_gpus_are_found_in_cuda_s_spelling(tmp_path: Path) -> None:
    found = machines.hgx_pairs(tmp_path).discover()
    address = found.gpus[0].address
    assert chosen(found, MemoryPlace(gpu=f"0000{address.upper()}")) == ["mlx5_0:1"]
    with pytest.raises(ConfigError, match=f"no GPU has the PCI address 'ff:00.0'.*{address}"):
        choose(found, MemoryPlace(gpu="ff:00.0"))


def test_named_ports_are_weighed_as_they_are(three: Topology) -> None:
    ports = weigh(three, MemoryPlace(numa_node=0), ["mlx5_1:1", "mlx5_10:1", "mlx5_0:1", "mlx5_7:1"])
    assert [(nic.device, nic.port, nic.weight) for nic in ports] == [
        ("mlx5_1", 1, 100),
        ("mlx5_10", 1, 200),
        ("mlx5_0", 1, 200),
    ]


def test_what_the_data_plane_is_told(tmp_path: Path) -> None:
    machine = Machine(tmp_path, num_nodes=2)
    machine.nic("mlx5_0", "", 0, Port(100))
    machine.nic("mlx5_1", "", 1, Port(400))
    chosen, left_out, _ = select_ports(MemoryPlace(numa_node=0), "", tmp_path)
    assert (chosen, [nic.device for nic in left_out]) == ([("mlx5_0:1", 50_000)], ["mlx5_1"])
    assert discover(tmp_path).nics[0].ports[0].gids
    assert not discover(tmp_path, gids=False).nics[0].ports[0].gids
    named = select_ports(MemoryPlace(numa_node=0), "mlx5_1:1,mlx5_0:1,mlx5_9:1", tmp_path)
    assert named == ([("mlx5_1:1", 100_000), ("mlx5_0:1", 50_000), ("mlx5_9:1", 1)], (), "")


@pytest.mark.parametrize(
    ("port", "says"),
    [
        (DOWN, "is DOWN (physically Disabled); check the cable, then: start the subnet manager"),
        (Port(state="2: INIT"), "is INIT"),
        (Port(layer="Ethernet", netdev="eth1", state="1: DOWN"), "then: ip link set eth1 up"),
        (
            Port(layer="Ethernet", netdev="eth1", gids=[(LINK_LOCAL, ROCE_V1)]),
            "has no RoCE v2 GID; ip addr add",
        ),
        (Port(lid=0), "has no LID"),
        (Port(layer="Unspecified"), "neither InfiniBand nor Ethernet"),
    ],
)
def test_ports_that_carry_nothing_are_left_out_by_name(tmp_path: Path, port: Port, says: str) -> None:
    machine = Machine(tmp_path)
    machine.nic("mlx5_0", "", 0, port)
    machine.nic("mlx5_1", "", 0)
    selection = choose(machine.discover(), MemoryPlace())
    assert [nic.device for nic in selection.chosen] == ["mlx5_1"]
    (refused,) = selection.refused
    assert str(refused).startswith("mlx5_0:1 ")
    assert says in str(refused)


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        (
            [
                (LINK_LOCAL, ROCE_V1),
                (LINK_LOCAL, ROCE_V2),
                (mapped("10.0.0.1"), ROCE_V1),
                (mapped("10.0.0.1"), ROCE_V2),
            ],
            3,
        ),
        ([(mapped("10.0.0.1"), ROCE_V2), (LINK_LOCAL, ROCE_V2)], 0),
        ([(LINK_LOCAL, ROCE_V2), (GLOBAL_IPV6, ROCE_V2), (mapped("10.0.0.1"), ROCE_V1)], 1),
        ([(GLOBAL_IPV6, ROCE_V2), (mapped("10.0.0.1"), ROCE_V2)], 1),
        ([(LINK_LOCAL, ROCE_V1), (LINK_LOCAL, ROCE_V2)], 1),
        ([(LINK_LOCAL, ROCE_V2), (mapped("169.254.0.1"), ROCE_V2)], 0),
        ([(mapped("127.0.0.1"), ROCE_V2), (LINK_LOCAL, ROCE_V2)], 1),
        ([(mapped("127.0.0.1"), ROCE_V2), (mapped("10.0.0.1"), ROCE_V2)], 1),
        ([(mapped("10.0.0.2"), ROCE_V2), (mapped("10.0.0.1"), ROCE_V2)], 0),
    ],
)
def test_the_gid_is_chosen_by_type_and_reach(tmp_path: Path, gids: list[tuple[str, str]], index: int) -> None:
    machine = Machine(tmp_path)
    machine.nic("mlx5_0", "", 0, Port(layer="Ethernet", netdev="eth1", gids=gids))
    (nic,) = choose(machine.discover(), MemoryPlace()).chosen
    assert (nic.gid_index, nic.gid, nic.link_layer) == (index, gids[index][0], LinkLayer.ETHERNET)


def test_the_operator_chooses_a_gid(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    gids = [(mapped("10.0.0.1"), ROCE_V2), (mapped("10.1.0.1"), ROCE_V1), (mapped("10.1.0.1"), ROCE_V2)]
    machine.nic("mlx5_0", "", 0, Port(layer="Ethernet", netdev="eth1", gids=gids))
    (nic,) = machine.discover().nics
    found = {
        text: best_gid(nic, nic.ports[0], text) for text in ("", "2", "10.1.0.0/16", "10.0.0.1", "1", "9")
    }
    assert [gid.index if gid else None for gid in found.values()] == [0, 2, 2, 0, None, None]


def test_infiniband_uses_the_gid_by_which_routers_forward(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    gids = [(LINK_LOCAL, ROCE_V1), ("fec0:0000:0005:0001:0000:0000:0000:0001", ROCE_V1)]
    machine.nic("mlx5_0", "", 0, Port(gids=gids))
    (nic,) = machine.discover().nics
    best = best_gid(nic, nic.ports[0])
    assert best is not None
    assert best.index == 1


def test_iwarp_has_gids_of_its_own_kind(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.nic("cxgb4_0", "", 0, Port(100, "Ethernet", gids=[(LINK_LOCAL, ROCE_V1)]))
    machine.write("sys/class/infiniband/cxgb4_0/node_type", "4: RNIC")
    (nic,) = machine.discover().nics
    assert best_gid(nic, nic.ports[0]) == nic.ports[0].gids[0]
    (chosen,) = choose(machine.discover(), MemoryPlace()).chosen
    assert (chosen.device, chosen.port) == ("cxgb4_0", 1)


MIB = 1 << 20
GOOD = Facts(
    num_bytes=64 * MIB,
    kind=Kind.CUDA_MALLOC,
    num_allocations=1,
    num_devices=1,
    mapped=True,
    rdma_capable=True,
    gpu_rdma=True,
    gpu_dma_buf=True,
    kernel=(6, 8),
    nic_refuses_dma_buf="",
    peermem=True,
    bar1_bytes=128 << 30,
)


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    machine = FakeRoot(tmp_path)
    machine.write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
    machine.card(HOPPER.bus_id, GPU, resource=bars(16 * MIB, 128 << 30, 32 * MIB))
    return machine


def test_the_best_way_comes_first() -> None:
    assert decide(GOOD) == Decision(Way.DMA_BUF, ())


@pytest.mark.parametrize(
    ("change", "way", "reasons"),
    [
        ({"kernel": (5, 11)}, Way.PEERMEM, ["kernel 5.11 is older than 5.12"]),
        ({"kernel": (4, 18)}, Way.PEERMEM, ["kernel 4.18 is older than 5.12"]),
        ({"gpu_dma_buf": False}, Way.PEERMEM, ["the GPU's driver exports no dma-buf"]),
        ({"nic_refuses_dma_buf": "irdma takes none"}, Way.PEERMEM, ["irdma takes none"]),
        (
            {"gpu_dma_buf": False, "peermem": False},
            Way.BOUNCE,
            ["the GPU's driver exports no dma-buf", "nvidia-peermem is not loaded"],
        ),
        ({"kind": Kind.VMM, "num_allocations": 32}, Way.DMA_BUF, []),
        (
            {"kind": Kind.VMM, "num_allocations": 32, "gpu_dma_buf": False},
            Way.BOUNCE,
            ["the GPU's driver exports no dma-buf", "the range crosses 32 allocations"],
        ),
        ({"kind": Kind.VMM, "gpu_dma_buf": False}, Way.PEERMEM, ["the GPU's driver exports no dma-buf"]),
        ({"num_allocations": 2}, Way.BOUNCE, ["the range crosses 2 cudaMalloc allocations"] * 2),
        ({"num_devices": 2}, Way.BOUNCE, ["the range is on 2 GPUs"] * 2),
        ({"mapped": False}, Way.BOUNCE, ["a part of the range is not mapped"] * 2),
        ({"gpu_rdma": False}, Way.BOUNCE, ["this GPU does not support GPUDirect RDMA"] * 2),
        ({"rdma_capable": False}, Way.BOUNCE, ["the memory was created without gpuDirectRDMACapable"] * 2),
        ({"kind": Kind.MANAGED}, Way.BOUNCE, ["cudaMallocManaged cannot be registered"] * 2),
        ({"kind": Kind.ASYNC}, Way.BOUNCE, ["cudaMallocAsync cannot be registered"] * 2),
        ({"kind": Kind.HOST}, Way.BOUNCE, ["host memory cannot be registered"] * 2),
        ({"bar1_bytes": 256 * MIB, "num_bytes": 257 * MIB}, Way.BOUNCE, ["the GPU's BAR1 window has"] * 2),
        ({"bar1_bytes": 256 * MIB, "num_bytes": 256 * MIB}, Way.DMA_BUF, []),
        ({"bar1_bytes": None}, Way.DMA_BUF, []),
    ],
)
def test_one_obstacle_at_a_time(change: dict[str, object], way: Way, reasons: list[str]) -> None:
    decision = decide(replace(GOOD, **change))  # type: ignore[arg-type]
    assert decision.way is way
    assert [each.way for each in decision.refused] == list(Way)[: len(reasons)]
    for refusal, reason in zip(decision.refused, reasons, strict=True):
        assert refusal.reason.startswith(reason)
        assert refusal.fix


def every_fact() -> list[Facts]:
    booleans = itertools.product((False, True), repeat=5)
    rest = list(itertools.product(Kind, (1, 2), (1, 2), ((5, 11), (5, 12)), ("", "no"), (None, 1, 1 << 40)))
    return [
        Facts(MIB, kind, allocations, devices, mapped, capable, rdma, dma_buf, kernel, nic, peermem, bar1)
        for mapped, capable, rdma, dma_buf, peermem in booleans
        for kind, allocations, devices, kernel, nic, bar1 in rest
    ]


def slow_decision(f: Facts) -> Way:
    """The same table, written the other way round: what each way needs."""
    reachable = f.mapped and f.rdma_capable and f.gpu_rdma and f.num_devices == 1
    window = f.bar1_bytes is None or f.bar1_bytes >= f.num_bytes
    one = f.kind is Kind.CUDA_MALLOC and f.num_allocations == 1
    if reachable and window and (one or f.kind is Kind.VMM):
        if f.kernel >= (5, 12) and f.gpu_dma_buf and not f.nic_refuses_dma_buf:
            return Way.DMA_BUF
        if f.peermem and f.num_allocations == 1:
            return Way.PEERMEM
    return Way.BOUNCE


def test_every_combination_of_facts() -> None:
    facts = every_fact()
    assert len(facts) == 32 * 5 * 2 * 2 * 2 * 2 * 3
    ways = [decide(each).way for each in facts]
    assert ways == [slow_decision(each) for each in facts]
    assert set(ways) == set(Way)


def test_what_the_operator_forbids_is_not_taken() -> None:
    assert decide(GOOD, (Way.PEERMEM, Way.BOUNCE)).way is Way.PEERMEM
    assert decide(GOOD, (Way.BOUNCE, Way.DMA_BUF)).way is Way.BOUNCE
    with pytest.raises(
        TransportUnavailable, match=r"cannot be exported \(peermem: nvidia-peermem is not"
    ) as caught:
        decide(replace(GOOD, peermem=False), (Way.PEERMEM,))
    assert caught.value.fix == "sudo modprobe nvidia-peermem"
    with pytest.raises(TransportUnavailable, match="no way is allowed"):
        decide(GOOD, ())


def test_a_decision_says_why_in_one_sentence() -> None:
    text = str(decide(replace(GOOD, gpu_dma_buf=False)))
    assert text.startswith(
        "peermem; not dma-buf: the GPU's driver exports no dma-buf (install the driver's open"
    )


def test_the_option() -> None:
    assert parse_ways("") == tuple(Way)
    assert parse_ways("bounce, dma-buf,bounce") == (Way.BOUNCE, Way.DMA_BUF)
    with pytest.raises(
        ConfigError, match="KVLINK_GPUDIRECT='nvlink' must list some of dma-buf, peermem, bounce"
    ):
        parse_ways("nvlink")


@given(st.integers(0, 1 << 48), st.integers(1, 1 << 32), st.sampled_from((4096, 65536)))
def test_pages_around_a_range(address: int, num_bytes: int, page: int) -> None:
    base, length = whole_pages(address, num_bytes, page)
    assert base % page == length % page == 0
    assert base <= address < base + page
    assert base + length - page < address + num_bytes <= base + length


def test_facts_of_a_tensor_inside_an_allocation(root: FakeRoot) -> None:
    cuda = FakeCuda(HOPPER, at(0x7F0000000000, 64 * MIB))
    facts, gpu, behind = inspect(cuda, 0x7F0000000200, MIB, "", root.path)
    assert (gpu, behind) == (HOPPER, cuda.allocations)
    assert facts == replace(GOOD, num_bytes=MIB, peermem=False)


def test_facts_of_expandable_segments(root: FakeRoot) -> None:
    segments = [at(0x1000000 + index * 2 * MIB, 2 * MIB, Kind.VMM, capable=index != 2) for index in range(4)]
    cuda = FakeCuda(HOPPER, *segments)
    whole, _, _ = inspect(cuda, 0x1000000, 8 * MIB, "", root.path)
    assert (whole.num_allocations, whole.mapped, whole.rdma_capable) == (4, True, False)
    two, _, _ = inspect(cuda, 0x1000000 + MIB, 2 * MIB, "", root.path)
    assert (two.num_allocations, two.mapped, two.rdma_capable) == (2, True, True)
    beyond, _, _ = inspect(cuda, 0x1000000, 9 * MIB, "", root.path)
    assert not beyond.mapped


def test_coherent_gpus_are_not_limited_by_bar1(root: FakeRoot) -> None:
    memory = at(0x1000000, MIB)
    assert inspect(FakeCuda(HOPPER, memory), 0x1000000, MIB, "", root.path)[0].bar1_bytes == 128 << 30
    coherent = FakeCuda(replace(HOPPER, coherent=True), memory)
    assert inspect(coherent, 0x1000000, MIB, "", root.path)[0].bar1_bytes is None


def test_memory_that_cuda_does_not_know(root: FakeRoot) -> None:
    with pytest.raises(TransportUnavailable, match="CUDA knows no memory at 0x1000"):
        export(FakeCuda(HOPPER), 0x1000, 1, root=root.path)


def test_exporting_by_dma_buf(root: FakeRoot) -> None:
    cuda = FakeCuda(HOPPER, at(0x1000000, 2 * MIB, Kind.VMM), at(0x1000000 + 2 * MIB, 2 * MIB, Kind.VMM))
    exported = export(cuda, 0x1000000 + 512, 3 * MIB, root=root.path)
    assert exported.decision.way is Way.DMA_BUF
    assert cuda.exported == [(0x1000000, 3 * MIB + 4096)]
    assert cuda.synced == [each.base for each in cuda.allocations]
    assert exported.offset == 512
    (fd,) = exported.fds
    os.fstat(fd)
    exported.close()
    exported.close()
    assert exported.fds == ()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_every_slice_has_a_dma_buf_of_whole_pages(root: FakeRoot) -> None:
    base = 0x100000000
    cuda = FakeCuda(HOPPER, at(base, 8 * MIB))
    with export(cuda, base + 512, 5 * MIB, slice_bytes=2 * MIB, root=root.path) as exported:
        assert (len(set(exported.fds)), exported.offset) == (3, 512)
    assert cuda.exported == [
        (base, 2 * MIB + 4096),
        (base + 2 * MIB, 2 * MIB + 4096),
        (base + 4 * MIB, MIB + 4096),
    ]


@pytest.mark.parametrize("known", [True, False])
def test_coherent_gpus_export_their_pcie_mapping_too(root: FakeRoot, known: bool) -> None:
    memory = at(0x1000000, 4 * MIB)
    with export(FakeCuda(HOPPER, memory), 0x1000000, 4 * MIB, root=root.path) as plain:
        assert plain.pcie_fds == ()
    cuda = FakeCuda(replace(HOPPER, coherent=True), memory)
    cuda.exports_pcie = known
    before = descriptors()
    with export(cuda, 0x1000000, 4 * MIB, slice_bytes=2 * MIB, root=root.path) as exported:
        assert (len(exported.fds), len(exported.pcie_fds)) == (2, 2 if known else 0)
        assert cuda.exported_pcie == (cuda.exported if known else [])
    assert not opened_since(before)


def test_no_descriptor_is_left_when_one_slice_cannot_be_exported(root: FakeRoot) -> None:
    cuda = FakeCuda(HOPPER, at(0x1000000, 8 * MIB))
    cuda.exports_left = 2
    before = descriptors()
    with pytest.raises(TransportUnavailable, match="cuMemGetHandleForAddressRange"):
        export(cuda, 0x1000000, 8 * MIB, slice_bytes=2 * MIB, root=root.path)
    assert len(cuda.exported) == 2
    assert not opened_since(before)


def test_exporting_by_peermem_exports_nothing(root: FakeRoot) -> None:
    root.write("sys/module/nvidia_peermem/version", "570")
    cuda = FakeCuda(replace(HOPPER, dma_buf=False), at(0x1000000, MIB))
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        assert (exported.decision.way, exported.fds, exported.offset) == (Way.PEERMEM, (), 0)
    assert (cuda.exported, cuda.synced) == ([], [0x1000000])


def test_the_bounce_buffer_touches_nothing(root: FakeRoot) -> None:
    cuda = FakeCuda(replace(HOPPER, rdma=False, ordering=Ordering.NONE), at(0x1000000, MIB))
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        assert (exported.decision.way, exported.fds) == (Way.BOUNCE, ())
        assert not exported.flush_writes()
    assert (cuda.exported, cuda.synced, cuda.flushed) == ([], [], [])


def test_memory_is_exported_even_if_cuda_refuses_synchronous_copies(
    root: FakeRoot, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(HOPPER, at(0x1000000, MIB))
    cuda.refuses_sync = True
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        assert exported.decision.way is Way.DMA_BUF
        assert len(exported.fds) == 1
    assert "CUDA refuses SYNC_MEMOPS" in caplog.text
    assert "cuPointerSetAttribute: CUDA_ERROR_INVALID_VALUE" in caplog.text


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("ordering", Ordering)
@pytest.mark.parametrize("scope", [Ordering.OWNER, Ordering.ALL_DEVICES])
def test_writes_are_flushed_only_where_the_gpu_does_not_order_them(
    root: FakeRoot, offered: bool, ordering: Ordering, scope: Ordering
) -> None:
    cuda = FakeCuda(replace(HOPPER, ordering=ordering, flush_from_host=offered), at(0x1000000, MIB))
    with export(cuda, 0x1000000, MIB, root=root.path) as exported:
        needed = offered and ordering < scope
        assert exported.flush_writes(scope) is needed
    assert cuda.flushed == ([scope] if needed else [])


def test_the_real_driver_without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TransportUnavailable, match="cuda-python is not installed") as caught:
        CudaDriver()
    assert caught.value.fix.startswith("pip install 'kvlink[cuda]'")
