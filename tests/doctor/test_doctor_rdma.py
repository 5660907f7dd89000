# SPDX-License-Identifier: Apache-2.0
"""The doctor on RDMA ports and on what a process needs to use them, over made-up kernel trees."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from doctor.rdma_checks import found, nics, silent
from hardware.fake_root import LINK_LOCAL, MAPPED, ROCE_V1, ROCE_V2, FakeRoot

from kvlink.doctor import Verdict, examine, rdma, verbs

PASS, WARN = Verdict.PASS, Verdict.WARN
# Opening a read-only kernel attribute for writing is refused even to root.
READ_ONLY = "/sys/devices/system/cpu/online"


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


@pytest.fixture
def low_memlock() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_a_machine_without_a_device_gets_two_lines(root: FakeRoot) -> None:
    checks = [*rdma.checks(root.path, (), {}, silent), *verbs.checks(root.path, ())]
    assert [check.name for check in checks] == ["rdma", "libibverbs"]
    assert checks[0].evidence == "absent: no RDMA device"


def test_every_check_of_a_machine_with_a_device(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    names = [check.name for check in examine(root.path, {})]
    wanted = "rdma, rdma gids, rdma mtu, rdma flow control, libibverbs, rdma providers, uverbs, rdma_cm, capabilities"
    assert [name for name in names if name in wanted.split(", ")] == wanted.split(", ")


def test_ports_that_are_up(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.nic("mlx5_1", "0000:42:00.0", link_layer="InfiniBand", netdev="", gids="")
    root.nic("cxgb4_0", "0000:43:00.0", node_type="4: RNIC", rate="100 Gb/sec (4X EDR)", netdev="eth2")
    check = found(root)["rdma"]
    assert check.verdict is PASS
    assert check.fix == ""
    assert check.evidence == (
        "cxgb4_0:1 (eth2) iWARP, 100 Gb/s, active; mlx5_0:1 (eth0) Ethernet, 400 Gb/s, active; "
        "mlx5_1:1 InfiniBand, 400 Gb/s, active"
    )


@pytest.mark.parametrize(
    ("port", "evidence", "fix"),
    [
        (
            {"state": "1: DOWN", "phys_state": "3: Disabled"},
            "mlx5_0:1 (eth0) Ethernet, 400 Gb/s, down, link Disabled",
            "sudo ip link set eth0 up",
        ),
        (
            {"state": "2: INIT", "link_layer": "InfiniBand", "netdev": ""},
            "mlx5_0:1 InfiniBand, 400 Gb/s, init, link LinkUp",
            "start a subnet manager on the fabric (opensm)",
        ),
        (
            {"state": "1: DOWN", "phys_state": "2: Polling", "link_layer": "InfiniBand", "netdev": ""},
            "mlx5_0:1 InfiniBand, 400 Gb/s, down, link Polling",
            "check the cable and the switch port",
        ),
    ],
)
def test_ports_that_are_down(root: FakeRoot, port: dict[str, str], evidence: str, fix: str) -> None:
    root.nic("mlx5_0", **port)
    check = found(root)["rdma"]
    assert (check.verdict, check.evidence, check.fix) == (WARN, evidence, fix)


def test_elastic_fabric_adapters_are_named(root: FakeRoot) -> None:
    root.nic("rdmap79s0", vendor="0x1d0f", link_layer="Unknown", node_type="7: unspecified")
    check = rdma.ports(nics(root))
    assert check.verdict is WARN
    assert "Elastic Fabric Adapter (EFA) without reliable connections" in check.evidence
    assert check.fix == "without another NIC, pulls take tcp"
    root.nic("mlx5_0", "0000:42:00.0")
    assert rdma.ports(nics(root)).verdict is PASS


def test_gids(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    check = found(root)["rdma gids"]
    assert (check.verdict, check.evidence) == (PASS, "mlx5_0:1 10.0.0.1 (index 1)")
    root.nic("mlx5_1", "0000:42:00.0", netdev="eth1", gids=f"{MAPPED} {ROCE_V1}, {LINK_LOCAL} {ROCE_V1}")
    check = found(root)["rdma gids"]
    assert (check.verdict, check.evidence) == (WARN, "mlx5_0:1 10.0.0.1 (index 1); mlx5_1:1 no RoCE v2 GID")
    assert check.fix.startswith("sudo ip address add ADDRESS/LENGTH dev eth1 ")


def test_gids_that_end_at_the_first_router(root: FakeRoot) -> None:
    root.nic("mlx5_0", gids=f"{LINK_LOCAL} {ROCE_V2}")
    check = found(root)["rdma gids"]
    assert (check.verdict, check.evidence) == (WARN, "mlx5_0:1 fe80::e42:a1ff:fe2b:1 (index 0)")


def test_gids_are_no_matter_on_infiniband(root: FakeRoot) -> None:
    root.nic("mlx5_0", link_layer="InfiniBand", netdev="", gids="")
    assert found(root)["rdma gids"].verdict is PASS


@pytest.mark.parametrize(
    ("netdev", "roce"),
    [(0, 0), (1500, 1024), (2200, 2048), (4191, 2048), (4192, 4096), (9000, 4096), (300, 256)],
)
def test_the_mtu_an_interface_leaves(netdev: int, roce: int) -> None:
    assert rdma.roce_mtu(netdev) == roce


def test_mtu_that_is_large(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    check = rdma.agreement(root.path, nics(root), {"mlx5_0": (4096,)})
    assert (check.verdict, check.evidence, check.fix) == (PASS, "mlx5_0:1 4096 (eth0 has 9000)", "")


def test_mtu_that_is_small(root: FakeRoot) -> None:
    root.nic("mlx5_0", mtu="1500")
    check = found(root)["rdma mtu"]
    assert (check.verdict, check.evidence) == (WARN, "mlx5_0:1 1024 (eth0 has 1500)")
    assert check.fix == "sudo ip link set eth0 mtu 9000 (switches and peers too)"


def test_mtu_that_differs_between_ports(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.nic("mlx5_1", "0000:42:00.0", netdev="eth1", mtu="2200")
    check = found(root)["rdma mtu"]
    assert check.verdict is WARN
    assert check.evidence.startswith(
        "mlx5_0:1 4096 (eth0 has 9000); mlx5_1:1 2048 (eth1 has 2200). Ports differ"
    )
    assert "eth1" in check.fix
    assert "eth0" not in check.fix


def test_mtu_that_did_not_follow_its_interface(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    check = rdma.agreement(root.path, nics(root), {"mlx5_0": (1024,)})
    assert check.verdict is WARN
    assert "mlx5_0:1 did not follow" in check.evidence
    assert check.fix == "sudo ip link set eth0 down; sudo ip link set eth0 up"


def test_mtu_of_a_port_that_is_down_does_not_count(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.nic("mlx5_1", "0000:42:00.0", netdev="eth1", mtu="1500", state="1: DOWN")
    check = found(root)["rdma mtu"]
    assert (check.verdict, check.evidence) == (PASS, "mlx5_0:1 4096 (eth0 has 9000)")


def test_mtu_of_a_soft_device_needs_no_jumbo_frames(root: FakeRoot) -> None:
    root.nic("rxe0", None, mtu="1500")
    assert found(root)["rdma mtu"].verdict is PASS


def test_mtu_that_nobody_says(root: FakeRoot) -> None:
    root.nic("mlx5_0", link_layer="InfiniBand", netdev="", gids="")
    check = found(root)["rdma mtu"]
    assert (check.verdict, check.fix) == (PASS, "ibv_devinfo -v | grep active_mtu")
    check = rdma.agreement(root.path, nics(root), {"mlx5_0": (2048,)})
    assert (check.verdict, check.evidence) == (PASS, "mlx5_0:1 2048")


def test_the_library() -> None:
    def absent(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    assert verbs.library(str).verdict is PASS
    check = verbs.library(absent)
    assert check.verdict is WARN
    assert "libibverbs.so.1: cannot open" in check.evidence
    assert "apt-get install libibverbs1" in check.fix


@pytest.mark.parametrize("folder", ["usr/lib/x86_64-linux-gnu/libibverbs", "usr/lib64/libibverbs"])
def test_providers(root: FakeRoot, folder: str) -> None:
    root.nic("rocep65s0")
    root.link("sys/bus/pci/devices/0000:41:00.0/driver", "sys/bus/pci/drivers/mlx5_core")
    root.nic("rxe0", None)
    check = verbs.providers(root.path, nics(root))
    assert check.verdict is WARN
    root.write(f"{folder}/librxe-rdmav34.so")
    check = verbs.providers(root.path, nics(root))
    assert (check.verdict, check.evidence) == (WARN, "rocep65s0 needs mlx5; installed: rxe")
    root.write(f"{folder}/libmlx5-rdmav34.so")
    check = verbs.providers(root.path, nics(root))
    assert (check.verdict, check.evidence) == (PASS, "installed: mlx5, rxe")


def test_device_files_of_a_container_without_them(root: FakeRoot) -> None:
    root.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    check = verbs.device_files(root.path)
    assert (check.verdict, check.evidence) == (
        WARN,
        "/dev/infiniband/uverbs0 (mlx5_0): No such file or directory",
    )
    assert "--device=/dev/infiniband" in check.fix
    root.write("dev/infiniband/uverbs0")
    assert verbs.device_files(root.path).verdict is PASS


def test_device_files_of_a_pod_with_one_device_of_many(root: FakeRoot) -> None:
    for number in range(9):
        root.write(f"sys/class/infiniband_verbs/uverbs{number}/ibdev", f"mlx5_{number}")
    assert verbs.device_files(root.path).evidence.count("No such file") == 1
    root.write("dev/infiniband/uverbs3")
    check = verbs.device_files(root.path)
    assert check.verdict is PASS
    assert check.evidence.startswith(
        "/dev/infiniband/uverbs3 (mlx5_3): readable and writable; of the host's other"
    )


def test_device_files_without_permission(root: FakeRoot) -> None:
    root.write("sys/class/infiniband_verbs/uverbs0/ibdev", "mlx5_0")
    root.link("dev/infiniband/uverbs0", READ_ONLY)
    check = verbs.device_files(root.path)
    assert (check.verdict, check.evidence) == (WARN, "/dev/infiniband/uverbs0 (mlx5_0): Permission denied")
    assert check.fix.startswith("sudo chmod 0666 /dev/infiniband/uverbs*")


def test_device_files_that_the_kernel_does_not_offer(root: FakeRoot) -> None:
    check = verbs.device_files(root.path)
    assert (check.verdict, check.fix) == (WARN, "sudo modprobe ib_uverbs")


def test_the_connection_manager_is_for_iwarp(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    assert verbs.connection_manager(root.path, nics(root)).verdict is PASS
    root.nic("cxgb4_0", "0000:43:00.0", node_type="4: RNIC")
    check = verbs.connection_manager(root.path, nics(root))
    assert check.verdict is WARN
    assert "cxgb4_0 cannot connect" in check.evidence
    assert "modprobe rdma_ucm" in check.fix
    root.write("dev/infiniband/rdma_cm")
    assert verbs.connection_manager(root.path, nics(root)).verdict is PASS


@pytest.mark.usefixtures("low_memlock")
def test_the_right_to_pin(root: FakeRoot) -> None:
    root.write("proc/self/status", "CapEff:\t0000000000003fff")
    check = verbs.pinning(root.path)
    assert check.verdict is WARN
    assert "--cap-add=IPC_LOCK" in check.fix
    root.write("proc/self/status", "CapEff:\t0000000000004000")
    assert verbs.pinning(root.path).verdict is PASS
