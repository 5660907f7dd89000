# SPDX-License-Identifier: Apache-2.0
"""kvlink doctor on RDMA: devices, ports, flow control, GPUDirect, and a trial transfer."""

from __future__ import annotations

import gzip
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
from hardware.fake_root import GPU, LINK_LOCAL, MAPPED, NIC, ROCE_V1, ROCE_V2, FakeRoot, bars, config_space

from kvlink.config.rdma_config import Way
from kvlink.doctor import Verdict, examine, gpudirect, rdma, trial, verbs
from kvlink.doctor.verdict import Check
from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import Allocation, Gpu, Kind
from kvlink.hardware.topology import PciDevice, discover, pci

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL
# Opening it for writing is refused even to root, and by its mode where /proc/sys and /sys are mounted read-only.
READ_ONLY = "/proc/sys/kernel/osrelease"


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


def test_interfaces_of_one_network_answer_for_their_own_addresses_alone(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.nic("mlx5_1", "0000:42:00.0", netdev="eth1")

    def arp(address: str) -> Check | None:
        shown = "".join(
            f"2: {name} inet {ip}/16 scope global\n"
            for name, ip in [("eth0", "10.1.0.1"), ("eth1", address), ("lo", "10.1.0.9")]
        )
        checks = rdma.checks(root.path, nics(root), {}, lambda *command: shown if command[0] == "ip" else "")
        return next((check for check in checks if check.name == "rdma arp"), None)

    assert arp("10.2.0.1") is None
    assert (check := arp("10.1.0.2")) is not None
    assert check.verdict is WARN
    assert check.evidence == "eth0, eth1 are in 10.1.0.0/16"
    assert "net.ipv4.conf.eth1.arp_announce=2" in check.fix
    root.write("proc/sys/net/ipv4/conf/all/arp_ignore", "1")
    for netdev in ("eth0", "eth1"):
        root.write(f"proc/sys/net/ipv4/conf/{netdev}/arp_announce", "2")
    assert (check := arp("10.1.0.2")) is not None
    assert check.verdict is PASS


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
    ("guarded", "mark", "own", "mark_for_it"),
    [
        (3, "", 0, "106"),
        (4, "tclass=-1", 0, "138"),
        (0, "", 0, ""),
        (3, "Global tclass=106", 0, ""),
        (3, None, 0, ""),
        (3, "", 106, ""),
        (3, None, 106, ""),
        (4, None, 106, "138"),
    ],
)
def test_packets_outside_the_guarded_priority(
    root: FakeRoot, guarded: int, mark: str | None, own: int, mark_for_it: str
) -> None:
    root.nic("mlx5_0")
    for end in ("np", "rp"):
        root.write(f"sys/class/net/eth0/ecn/roce_{end}/enable/{guarded}", "1")
    if mark is not None:
        root.write("sys/class/infiniband/mlx5_0/tc/1/traffic_class", mark)
    check = rdma.flow_control(root.path, nics(root), silent, own)
    assert check.verdict is (WARN if mark_for_it else PASS)
    assert (", traffic class" in check.evidence) == (mark is not None)
    assert (f"KVLINK_RDMA_TRAFFIC_CLASS={own}, priority 3" in check.evidence) == (own > 0)
    how = f"set KVLINK_RDMA_TRAFFIC_CLASS={mark_for_it} at both ends"
    assert check.fix == (
        f"{how}, where the host trusts DSCP: sudo mlnx_qos -i eth0 --trust dscp" if mark_for_it else ""
    )


def test_interfaces_alike_give_one_warning(tmp_path: Path) -> None:
    check = rdma.flow_control(tmp_path, machines.hgx_h100(tmp_path).discover().nics[:8], silent)
    assert check.evidence.startswith(
        "rail0, rail1, rail2, rail3, rail4, rail5, rail6, rail7: PFC cannot tell"
    )
    assert check.fix.count("sudo mlnx_qos") == 1
    assert check.fix.endswith("(the same for rail1, rail2, rail3, rail4, rail5, rail6, rail7)")


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


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03"
POSSIBLE = "CONFIG_DMA_SHARED_BUFFER=y\nCONFIG_INFINIBAND_ON_DEMAND_PAGING=y"
GPU_ADDRESS, NIC_ADDRESS, SWITCH = "0000:1b:00.0", "0000:1a:00.0", ("0000:18:00.0", "0000:19:01.0")
FAST = {"current_link_speed": "32.0 GT/s PCIe", "max_link_speed": "32.0 GT/s PCIe"}
WIDE = {"current_link_width": "16", "max_link_width": "16"}


def cards(root: FakeRoot) -> tuple[PciDevice, ...]:
    addresses = (GPU_ADDRESS, NIC_ADDRESS)
    found = (pci.device(root.path, f"{pci.DEVICES}/{address}", None) for address in addresses)
    return tuple(card for card in found if card)


def silent_machine(*command: str) -> str:
    return ""


def test_a_machine_without_a_gpu_gets_one_line(root: FakeRoot) -> None:
    (check,) = gpudirect.checks(root.path, (), (), silent_machine)
    assert (check.verdict, check.evidence) == (PASS, "no NVIDIA GPU on the PCI bus: nothing to check")


def test_every_check_of_a_machine_with_a_gpu(root: FakeRoot) -> None:
    root.card(GPU_ADDRESS, GPU)
    machine = discover(root.path)
    names = [check.name for check in gpudirect.checks(root.path, machine.gpus, machine.nics, silent_machine)]
    assert names == ["dma-buf", "peermem", "bar1", "iommu", "acs", "pcie links"]


@pytest.mark.parametrize(
    ("release", "driver", "config", "verdict", "fix"),
    [
        ("6.8.0-40-generic", OPEN, POSSIBLE, PASS, ""),
        ("5.12.0", OPEN, "", PASS, ""),
        ("5.11.22", OPEN, "", WARN, "boot a kernel of 5.12 or later"),
        ("4.18.0-553.el8", OPEN, "", WARN, "boot a kernel of 5.12 or later"),
        ("6.8.0", CLOSED, "", WARN, "install the driver's open kernel modules"),
        ("6.8.0", "", "", WARN, "install the driver's open kernel modules"),
        (
            "6.8.0",
            OPEN,
            "CONFIG_DMA_SHARED_BUFFER=y\n# CONFIG_INFINIBAND_ON_DEMAND_PAGING is not set",
            WARN,
            "CONFIG_INFINIBAND_ON_DEMAND_PAGING=y",
        ),
        ("6.8.0", OPEN, "# CONFIG_DMA_SHARED_BUFFER is not set", WARN, "CONFIG_DMA_SHARED_BUFFER=y"),
    ],
)
def test_dma_buf(root: FakeRoot, release: str, driver: str, config: str, verdict: Verdict, fix: str) -> None:
    root.write("proc/sys/kernel/osrelease", release)
    if driver:
        root.write("proc/driver/nvidia/version", f"{driver}\nGCC version: 12")
    if config:
        root.write(f"boot/config-{release}", config)
    check = gpudirect.dma_buf(root.path)
    assert check.verdict is verdict
    assert fix in check.fix
    assert bool(check.fix) == (verdict is WARN)


def test_the_kernel_configuration_may_be_compressed(root: FakeRoot) -> None:
    root.write("proc/sys/kernel/osrelease", "6.8.0")
    root.write("proc/driver/nvidia/version", OPEN)
    text = f"{POSSIBLE}\nCONFIG_PCI_P2PDMA=y\n# CONFIG_DMABUF_MOVE_NOTIFY is not set\n"
    root.write("proc/config.gz", gzip.compress(text.encode()))
    check = gpudirect.dma_buf(root.path)
    assert check.verdict is PASS
    assert "CONFIG_PCI_P2PDMA=y, CONFIG_DMABUF_MOVE_NOTIFY=n" in check.evidence


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sys/module/nvidia_peermem", "nvidia_peermem"),
        ("sys/module/nv_peer_mem", "nv_peer_mem"),
        ("sys/kernel/mm/memory_peers/nv_mem", "memory_peers/nv_mem"),
    ],
)
def test_peermem_stands_in_for_dma_buf(root: FakeRoot, module: str, name: str) -> None:
    root.write("proc/sys/kernel/osrelease", "5.4.0")
    check = gpudirect.peermem(root.path)
    assert (check.verdict, check.fix) == (WARN, "sudo modprobe nvidia-peermem")
    assert gpudirect.dma_buf(root.path).verdict is WARN
    root.write(f"{module}/version", "570.86.15")
    assert gpudirect.peermem(root.path) == Check("peermem", PASS, f"{name} is loaded")
    assert gpudirect.dma_buf(root.path).verdict is PASS


def test_peermem_is_not_needed_beside_dma_buf(root: FakeRoot) -> None:
    root.write("proc/sys/kernel/osrelease", "6.8.0")
    root.write("proc/driver/nvidia/version", OPEN)
    check = gpudirect.peermem(root.path)
    assert (check.verdict, check.evidence) == (PASS, "not loaded, and not needed: dma-buf comes first")


@pytest.mark.parametrize(
    ("bar1", "memory_mib", "verdict"),
    [
        (128 << 30, "81559", PASS),
        (64 << 30, "65536", PASS),
        (64 << 30, "81559", WARN),
        (256 << 20, "", WARN),
        (32 << 30, "", PASS),
        (0, "24576", WARN),
    ],
)
def test_bar1(root: FakeRoot, bar1: int, memory_mib: str, verdict: Verdict) -> None:
    sizes = (16 << 20, bar1, 32 << 20) if bar1 else (16 << 20,)
    root.card(GPU_ADDRESS, GPU, resource=bars(*sizes))

    def run(*command: str) -> str:
        assert command[0] == "nvidia-smi"
        return f"00000000:1B:00.0, {memory_mib}\n" if memory_mib else ""

    check = gpudirect.bar1(root.path, discover(root.path).gpus, run)
    assert check.verdict is verdict
    assert check.evidence.startswith(f"{GPU_ADDRESS} BAR1 ")
    assert ("Resizable BAR" in check.fix) == (verdict is WARN)


@pytest.mark.parametrize(
    ("kind", "cmdline", "unit", "verdict", "says"),
    [
        ("", "quiet", False, PASS, "off, or hidden"),
        (
            "identity",
            "quiet iommu=pt intel_iommu=on",
            True,
            PASS,
            "(kernel options: iommu=pt intel_iommu=on)",
        ),
        ("DMA-FQ", "quiet intel_iommu=on", True, WARN, f"translates for {GPU_ADDRESS} (DMA-FQ)"),
        ("DMA", "amd_iommu=on", True, WARN, f"translates for {GPU_ADDRESS} (DMA)"),
        ("", "quiet", True, WARN, "its mode is unknown"),
        ("", "iommu=pt", True, PASS, "passes GPUs and NICs through"),
    ],
)
def test_iommu(root: FakeRoot, kind: str, cmdline: str, unit: bool, verdict: Verdict, says: str) -> None:
    root.card(GPU_ADDRESS, GPU)
    root.write("proc/cmdline", cmdline)
    if unit:
        root.write("sys/class/iommu/dmar0/intel-iommu/cap", "0")
    if kind:
        root.write("sys/kernel/iommu_groups/7/type", kind)
        root.link(f"sys/bus/pci/devices/{GPU_ADDRESS}/iommu_group", "sys/kernel/iommu_groups/7")
    check = gpudirect.iommu(root.path, cards(root))
    assert check.verdict is verdict
    assert says in check.evidence
    assert ("iommu=pt" in check.fix) == (verdict is WARN)


def switch(root: FakeRoot, downstream: bytes) -> None:
    """A GPU and a NIC under one switch; its two bridges have these registers."""
    root.card(SWITCH[0], ("0x1000", "0x060400"), config=config_space(0))
    root.card(SWITCH[1], ("0x1000", "0x060400"), SWITCH[:1], config=downstream)
    root.card(GPU_ADDRESS, GPU, SWITCH)
    root.card(NIC_ADDRESS, NIC, SWITCH)


@pytest.mark.parametrize(
    ("control", "verdict"), [(None, PASS), (0, PASS), (0x01, PASS), (0x04, WARN), (0x08, WARN), (0x1D, WARN)]
)
def test_access_control_services(root: FakeRoot, control: int | None, verdict: Verdict) -> None:
    switch(root, config_space(control))
    check = gpudirect.redirection(root.path, cards(root))
    assert check.verdict is verdict
    if verdict is WARN:
        assert check.evidence.startswith(f"{SWITCH[1]} redirect")
        assert check.fix.startswith(f"sudo setpci -s {SWITCH[1]} ECAP_ACS+0x6.w=0000 ")
    else:
        assert check.evidence == "no redirection by 2 bridge(s) above GPUs and NICs"


def test_access_control_services_that_only_root_sees(root: FakeRoot) -> None:
    switch(root, config_space(0x1D, size=64))
    check = gpudirect.redirection(root.path, cards(root))
    assert (check.verdict, check.evidence) == (
        WARN,
        f"unknown: only root can read the registers of {SWITCH[1]}",
    )
    assert "lspci -vvv" in check.fix


def test_access_control_services_without_bridges(root: FakeRoot) -> None:
    root.card(GPU_ADDRESS, GPU)
    check = gpudirect.redirection(root.path, cards(root))
    assert (check.verdict, check.evidence) == (PASS, "no PCIe bridge above GPUs and NICs is visible here")


@pytest.mark.parametrize("space", [b"\xff" * 4096, b"\0" * 4096, (b"\0" * 0x100 + b"\x01\x00\x00\x10") * 15])
def test_broken_configuration_spaces_end(space: bytes) -> None:
    assert gpudirect.acs_control(space) == 0


@pytest.mark.parametrize(
    ("gpu", "nic", "slow"),
    [
        ({}, {}, ()),
        ({"current_link_speed": "2.5 GT/s PCIe"}, {}, ()),
        ({"current_link_width": "8"}, {}, (GPU_ADDRESS,)),
        ({}, {"current_link_speed": "16.0 GT/s PCIe"}, (NIC_ADDRESS,)),
        ({}, {"current_link_width": "4"}, (NIC_ADDRESS,)),
        ({"current_link_speed": "Unknown", "current_link_width": "0"}, {}, ()),
    ],
)
def test_links(root: FakeRoot, gpu: dict[str, str], nic: dict[str, str], slow: tuple[str, ...]) -> None:
    root.card(GPU_ADDRESS, GPU, **{**FAST, **WIDE, **gpu})
    root.card(NIC_ADDRESS, NIC, **{**FAST, **WIDE, **nic})
    check = gpudirect.links(root.path, discover(root.path).gpus, cards(root))
    assert check.verdict is (WARN if slow else PASS)
    assert all(f"sudo lspci -vv -s {address}" in check.fix for address in slow)
    assert ("not readable" in check.evidence) == ("Unknown" in gpu.values())
