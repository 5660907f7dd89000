# SPDX-License-Identifier: Apache-2.0
"""Pods and containers: sysfs shows the host's devices, ports and addresses, of which a process may use some."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware import machines
from hardware.machines import LINK_LOCAL, ROCE_V2, Machine, Port, mapped

from kvlink.errors import ConfigError
from kvlink.hardware.nics import MemoryPlace, choose, select_ports
from kvlink.hardware.nics.candidates import best_gid
from kvlink.hardware.sysfs import local_addresses

_OURS, _THEIRS = "10.56.0.12", "10.56.0.11"


def namespace(machine: Machine, *addresses: str) -> None:
    """Gives the network namespace these IPv4 addresses."""
    lines = [line for address in addresses for line in (f"     |-- {address}", "        /32 host LOCAL")]
    machine.write(
        "proc/net/fib_trie",
        "\n".join(["Local:", "     |-- 10.56.0.255", "        /32 link BROADCAST", *lines]),
    )


def node(machine: Machine, number: int, device: str, *, opens: bool) -> None:
    machine.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", device)
    if opens:
        machine.write(f"dev/infiniband/uverbs{number}", "")


def sriov_host(root: Path, num_cards: int = 2, num_virtual: int = 4) -> Machine:
    """Cards with a physical function and virtual ones, all on the bridge of a GPU."""
    machine = Machine(root)
    gpu, *slots = machine.switch(machine.root_port(0), 0, 1 + num_cards)
    machine.gpu(gpu, 0)
    numbers = iter(range(1000))
    for card, slot in enumerate(slots):
        address = f"0000:{0x60 + card:02x}:00"
        port = Port(layer="Ethernet", netdev=f"pf{card}", gids=[(mapped(f"10.{card}.0.1"), ROCE_V2)])
        physical = machine.nic(f"mlx5_{next(numbers)}", slot, 0, port, slot=f"{address}.0")
        for function in range(1, 1 + num_virtual):
            gids = [(mapped(f"10.{card}.1.{function}"), ROCE_V2)]
            virtual = Port(layer="Ethernet", netdev=f"vf{card}_{function}", gids=gids)
            at = machine.nic(f"mlx5_{next(numbers)}", slot, 0, virtual, slot=f"{address}.{function}")
            machine.link(f"{at}/physfn", physical)
    return machine


def ports_of(root: Path, place: MemoryPlace | None = None, spec: str = "") -> list[str]:
    return [name for name, _ in select_ports(place or MemoryPlace(), spec, root).ports]


def test_only_what_opens_is_a_candidate(tmp_path: Path) -> None:
    machine = sriov_host(tmp_path)
    for number in range(10):
        node(machine, number, f"mlx5_{number}", opens=number == 7)
    assert ports_of(tmp_path) == ["mlx5_7:1"]
    refused = {str(each) for each in select_ports(MemoryPlace(), "", tmp_path).refused}
    assert any(each.startswith("mlx5_0:1 cannot be opened by this process: No such file") for each in refused)
    assert all("--device=/dev/infiniband" in each for each in refused)


def test_a_container_without_device_files_has_no_candidate(tmp_path: Path) -> None:
    machine = sriov_host(tmp_path)
    for number in range(10):
        node(machine, number, f"mlx5_{number}", opens=False)
    assert ports_of(tmp_path) == []


def test_a_wire_has_one_function(tmp_path: Path) -> None:
    found = sriov_host(tmp_path).discover()
    selection = choose(found, MemoryPlace(gpu=found.gpus[0].address))
    assert [nic.device for nic in selection.chosen] == ["mlx5_0", "mlx5_5"]
    assert any(str(each).startswith("mlx5_1:1 shares its wire with mlx5_0:1") for each in selection.refused)
    assert len(choose(found, MemoryPlace(), "mlx5_0,mlx5_1").chosen) == 2, "what an operator names is used"


def test_the_function_of_a_wire_has_an_address_of_this_namespace(tmp_path: Path) -> None:
    namespace(sriov_host(tmp_path), "10.0.1.3", "10.1.0.1")
    assert ports_of(tmp_path) == ["mlx5_3:1", "mlx5_5:1"]


def test_no_more_ports_than_peers_accept(tmp_path: Path) -> None:
    sriov_host(tmp_path, num_cards=40, num_virtual=0)
    selection = select_ports(MemoryPlace(), "", tmp_path)
    assert len(selection.ports) == 32
    assert sum("is beyond the 32 ports" in each.reason for each in selection.refused) == 8


@pytest.mark.parametrize(
    ("ours", "gids", "index"),
    [
        ([_OURS], [LINK_LOCAL, mapped(_THEIRS), mapped(_OURS)], 2),
        ([_OURS], [mapped(_THEIRS), LINK_LOCAL], 1),
        ([_OURS], [mapped(_THEIRS)], 0),
        ([], [LINK_LOCAL, mapped(_THEIRS), mapped(_OURS)], 1),
    ],
    ids=["ours", "link-local", "only another's", "cannot be told"],
)
def test_gids_of_this_namespace_come_first(
    tmp_path: Path, ours: list[str], gids: list[str], index: int
) -> None:
    machine = Machine(tmp_path)
    machine.nic("mlx5_0", "", 0, Port(layer="Ethernet", netdev="eth0", gids=[(gid, ROCE_V2) for gid in gids]))
    if ours:
        namespace(machine, *ours)
    (device,) = machine.discover().nics
    best = best_gid(device, device.ports[0])
    assert best is not None
    assert best.index == index


def test_the_kernel_names_the_addresses_of_a_namespace(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    namespace(machine, _OURS)
    machine.write("proc/net/if_inet6", "20010db8000000000000000000000001 02 40 00 80 eth0")
    assert {str(each) for each in local_addresses(tmp_path)} == {_OURS, "2001:db8::1"}
    assert "127.0.0.1" in {str(each) for each in local_addresses(Path("/"))}


def test_a_name_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    sriov_host(tmp_path)
    with pytest.raises(ConfigError, match="KVLINK_NICS names mlx5_99"):
        select_ports(MemoryPlace(), "mlx5_99", tmp_path)


def test_host_memory_leaves_slower_networks_to_storage(tmp_path: Path) -> None:
    place = MemoryPlace(gpu=machines.dgx_h100(tmp_path).discover().gpus[0].address, bounced=True)
    assert ports_of(tmp_path, place) == ["mlx5_0:1", "mlx5_3:1", "mlx5_4:1", "mlx5_5:1"]
    refused = [str(each) for each in select_ports(place, "", tmp_path).refused]
    assert any("mlx5_1:1 is slow: 200 Gb/s where mlx5_0:1 has 400" in each for each in refused)
