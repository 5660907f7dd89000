# SPDX-License-Identifier: Apache-2.0
"""kvlink doctor on RDMA: devices, ports, flow control, and a trial transfer."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from doctor.rdma_checks import found, nics, silent
from hardware import machines
from hardware.fake_cuda import HOPPER
from hardware.fake_root import GPU, LINK_LOCAL, MAPPED, ROCE_V1, ROCE_V2, FakeRoot

from kvlink.config.nic_options import Way
from kvlink.doctor import Verdict, examine, mtu, rdma, trial, verbs
from kvlink.doctor.verdict import Check
from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import Allocation, Gpu, Kind
from kvlink.hardware.topology import discover

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL
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
    assert mtu.roce_mtu(netdev) == roce


def test_mtu_that_is_large(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    check = mtu.agreement(root.path, nics(root), {"mlx5_0": (4096,)})
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
    check = mtu.agreement(root.path, nics(root), {"mlx5_0": (1024,)})
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
    check = mtu.agreement(root.path, nics(root), {"mlx5_0": (2048,)})
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


DCB = "pfc-cap 8 macsec-bypass off delay 0 \nprio-pfc 0:off 1:off 2:off 3:{} 4:off 5:off 6:off 7:off \n"
MLNX_QOS = """DCBX mode: OS controlled
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   {}   0   0   0   0
\tbuffer      0   0   0   1   0   0   0   0
"""


@pytest.mark.parametrize(
    ("tool", "output", "on", "off"), [("dcb", DCB, "on", "off"), ("mlnx_qos", MLNX_QOS, "1", "0")]
)
def test_priority_flow_control(root: FakeRoot, tool: str, output: str, on: str, off: str) -> None:
    root.nic("mlx5_0")

    def flow(enabled: str) -> Check:
        def run(*command: str) -> str:
            assert "eth0" in command
            return output.format(enabled) if command[0] == tool else ""

        return rdma.flow_control(root.path, nics(root), run)

    assert flow(on) == Check("rdma flow control", PASS, "eth0: PFC on priority 3, ECN cannot tell")
    check = flow(off)
    assert (check.verdict, check.evidence) == (WARN, "eth0: PFC off, ECN cannot tell")
    assert check.fix.startswith("sudo mlnx_qos -i eth0 --pfc 0,0,0,1,0,0,0,0; ")


def test_congestion_notification(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    for end, enabled in (("np", (3, 4)), ("rp", (3,))):
        for priority in range(8):
            at = f"sys/class/net/eth0/ecn/roce_{end}/enable/{priority}"
            root.write(at, "1" if priority in enabled else "0")
    check = found(root)["rdma flow control"]
    assert (check.verdict, check.evidence) == (PASS, "eth0: PFC cannot tell, ECN on priority 3")
    root.write("sys/class/net/eth0/ecn/roce_rp/enable/3", "0")
    check = found(root)["rdma flow control"]
    assert (check.verdict, check.evidence) == (WARN, "eth0: PFC cannot tell, ECN off")


@pytest.mark.parametrize(
    ("guarded", "mark", "mark_for_it"),
    [(3, "", "106"), (4, "tclass=-1", "138"), (0, "", ""), (3, "Global tclass=106", ""), (3, None, "")],
)
def test_packets_outside_the_guarded_priority(
    root: FakeRoot, guarded: int, mark: str | None, mark_for_it: str
) -> None:
    root.nic("mlx5_0")
    for end in ("np", "rp"):
        root.write(f"sys/class/net/eth0/ecn/roce_{end}/enable/{guarded}", "1")
    if mark is not None:
        root.write("sys/class/infiniband/mlx5_0/tc/1/traffic_class", mark)
    check = found(root)["rdma flow control"]
    assert check.verdict is (WARN if mark_for_it else PASS)
    assert ("traffic class" in check.evidence) == (mark is not None)
    how = f"echo {mark_for_it} | sudo tee /sys/class/infiniband/mlx5_0/tc/1/traffic_class"
    assert check.fix == (f"sudo mlnx_qos -i eth0 --trust dscp; {how}" if mark_for_it else "")


def test_flow_control_that_cannot_be_told(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    check = found(root)["rdma flow control"]
    assert (check.verdict, check.evidence) == (WARN, "eth0: PFC cannot tell, ECN cannot tell")
    assert "mlnx_qos -i eth0" in check.fix


def test_flow_control_is_for_cards(root: FakeRoot) -> None:
    root.nic("rxe0", None)
    assert found(root)["rdma flow control"].verdict is PASS


def test_the_command_names_every_part_that_is_missing() -> None:
    command = [sys.executable, "-m", "kvlink", "doctor", "--gpudirect", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    rows = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    parts = [f"part: {name}" for name in ("gpu", "torch", "cuda-python", "nic", "verbs")]
    assert list(rows)[: len(parts)] == parts
    failed = [row for row in rows.values() if row["verdict"] == "fail"]
    assert done.returncode == (1 if failed else 0), done.stderr
    assert all(row["evidence"] and row["fix"] for row in failed)


def test_the_gpu(tmp_path: Path) -> None:
    root = FakeRoot(tmp_path)
    check = trial.gpu(discover(tmp_path).gpus)
    assert (check.verdict, check.evidence) == (FAIL, "no NVIDIA GPU on the PCI bus")
    root.card("0000:1b:00.0", GPU)
    check = trial.gpu(discover(tmp_path).gpus)
    assert (check.verdict, check.evidence) == (PASS, "0000:1b:00.0")


def test_the_nic(tmp_path: Path) -> None:
    root = FakeRoot(tmp_path)
    assert trial.nic(discover(tmp_path).nics).evidence == "no RDMA device"
    root.nic("mlx5_0", state="1: DOWN")
    check = trial.nic(discover(tmp_path).nics)
    assert (check.verdict, check.evidence) == (FAIL, "no active port of mlx5_0")
    root.nic("mlx5_1", "0000:42:00.0", netdev="eth1")
    root.port("mlx5_1", 2, netdev="eth2")
    check = trial.nic(discover(tmp_path).nics)
    assert (check.verdict, check.evidence) == (PASS, "mlx5_1:1, mlx5_1:2")


def test_cuda_python() -> None:
    class Driver:
        def gpu(self, ordinal: int) -> Gpu:
            return Gpu(ordinal, "0000:1b:00.0", True, True, False, 200, True)

    def absent() -> trial.Driver:
        raise TransportUnavailable("no CUDA driver: libcuda.so.1 is missing", "install the NVIDIA driver")

    assert "0000:1b:00.0" in trial.cuda_python(Driver).evidence  # type: ignore[arg-type]
    check = trial.cuda_python(absent)
    assert (check.verdict, check.fix) == (FAIL, "install the NVIDIA driver")


def test_bytes_that_arrive_both_ways() -> None:
    torch = pytest.importorskip("torch", reason="pip install 'kvlink[torch]'")
    memory = torch.zeros(trial.pool_bytes(), dtype=torch.uint8)
    check = trial.read_back("here tcp", memory, {"KVLINK_TRANSPORTS": "tcp"})
    assert check.verdict is PASS, check.evidence
    assert check.evidence.startswith(f"{trial.pool_bytes()} bytes equal each way, cpu; ")
    assert check.evidence.count("over tcp") == 2


def test_bytes_that_change_on_the_way() -> None:
    torch = pytest.importorskip("torch", reason="pip install 'kvlink[torch]'")
    memory = torch.zeros(trial.pool_bytes(), dtype=torch.uint8)
    options = {"KVLINK_TRANSPORTS": "fault+tcp", "KVLINK_FAULT": "corrupt-data@1"}
    check = trial.read_back("here fault", memory, options)
    assert check.verdict is FAIL
    assert check.evidence.startswith(
        f"1 of {trial.pool_bytes()} bytes read from the GPU differ, the first at "
    )


def test_a_transfer_that_fails() -> None:
    torch = pytest.importorskip("torch", reason="pip install 'kvlink[torch]'")
    memory = torch.zeros(trial.pool_bytes(), dtype=torch.uint8)
    check = trial.read_back("here fault", memory, {"KVLINK_TRANSPORTS": "nothing"})
    assert check.verdict is FAIL
    assert "there is no transport 'nothing'" in check.evidence


def test_a_way_that_the_facts_rule_out_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'kvlink[torch]'")
    monkeypatch.setattr(
        trial, "gpu_memory", lambda device: torch.zeros(trial.pool_bytes(), dtype=torch.uint8)
    )

    class Driver:
        def allocation(self, address: int) -> Allocation:
            return Allocation(address, trial.pool_bytes(), 0, Kind.CUDA_MALLOC, True)

        def gpu(self, ordinal: int) -> Gpu:
            return Gpu(ordinal, "0000:1b:00.0", False, True, False, 200, True)

    check = trial.through(Driver(), "mlx5_0:1", Way.DMA_BUF, 0)  # type: ignore[arg-type]
    assert (check.name, check.verdict) == ("mlx5_0:1 cuda:0 dma-buf", Verdict.WARN)
    assert "this GPU does not support GPUDirect RDMA" in check.evidence
    assert check.fix


def test_a_gpu_is_tried_with_the_ports_that_a_worker_chooses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = machines.azure_nd(tmp_path).discover()

    class Driver:
        def gpu(self, number: int) -> Gpu:
            return replace(HOPPER, bus_id=machine.gpus[2 * number].address)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = dict(trial.chosen(Driver(), machine))  # type: ignore[arg-type]
    assert [[nic.device for nic in found[number].chosen] for number in (0, 1)] == [["mlx5_7"], ["mlx5_5"]]
