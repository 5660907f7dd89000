# SPDX-License-Identifier: Apache-2.0
"""Ports that carry nothing are left out with a reason, and a port's GID is chosen by type and reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware.machines import DOWN, GLOBAL_IPV6, LINK_LOCAL, ROCE_V1, ROCE_V2, Machine, Port, mapped

from kvlink.hardware.nics import MemoryPlace, best_gid, choose
from kvlink.hardware.topology import LinkLayer


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
