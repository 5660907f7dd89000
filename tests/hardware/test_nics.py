# SPDX-License-Identifier: Apache-2.0
"""Which NICs serve which memory, on kernel trees of published servers, and with which weight."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware import machines
from hardware.machines import DOWN, ETHERNET, Machine, Port

from kvlink.errors import ConfigError
from kvlink.hardware.nics import MemoryPlace, NicSelection, choose, select_ports, weigh
from kvlink.hardware.topology import Distance, Topology, discover


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
