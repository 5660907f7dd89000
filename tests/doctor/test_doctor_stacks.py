# SPDX-License-Identifier: Apache-2.0
"""The doctor on the driver stacks around GPUs and NICs, over made-up kernel trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from hardware.fake_root import FakeRoot

from kvlink.doctor import Verdict, stacks
from kvlink.hardware.topology import discover

PASS, WARN = Verdict.PASS, Verdict.WARN


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def found(root: FakeRoot, **env: str) -> list[tuple[str, Verdict, str]]:
    checks = stacks.checks(root.path, discover(root.path).nics, env)
    return [(check.name, check.verdict, f"{check.evidence}; {check.fix}") for check in checks]


def test_a_machine_without_stacks_gets_no_line(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.write("sys/module/mlx5_core/parameters/prof_sel", "2")
    root.write("proc/devices", "195 nvidia")
    assert found(root) == []


@pytest.mark.parametrize(
    ("files", "name", "verdict", "says"),
    [
        ({"sys/module/mlx5_core/version": "24.10-2.1.8"}, "ofed", PASS, "mlx5_core 24.10-2.1.8: DOCA-OFED or MLNX"),
        ({"sys/module/nv_peer_mem/version": "1.3"}, "nv_peer_mem", WARN, "1.3 is loaded and is obsolete; sudo rmmod"),
        ({"sys/module/gdrdrv/version": "2.4"}, "gdrcopy", PASS, "gdrdrv 2.4: kvlink does not use"),
        ({"sys/module/nvidia_fs/initstate": "live"}, "gpudirect storage", PASS, "nvidia_fs: GPUDirect Storage"),
        (
            {"sys/bus/pci/drivers/nvidia-nvswitch/0000:85:00.0/vendor": "0x10de", "proc/731/comm": "nv-fabricmanager"},
            "fabric manager", PASS, "NVLink between the GPUs of this host works",
        ),
        (
            {"sys/bus/pci/drivers/nvidia-nvswitch/0000:85:00.0/vendor": "0x10de", "proc/731/comm": "bash"},
            "fabric manager", WARN, "systemctl start nvidia-fabricmanager",
        ),
        (
            {"proc/devices": "234 nvidia-caps-imex-channels", "dev/nvidia-caps-imex-channels/channel0": ""},
            "imex", PASS, "1 IMEX channels are visible",
        ),
    ],
)  # fmt: skip
def test_a_stack_is_named_with_its_version(
    root: FakeRoot, files: dict[str, str], name: str, verdict: Verdict, says: str
) -> None:
    for path, text in files.items():
        root.write(path, text)
    ((shown, judged, sentence),) = found(root)
    assert (shown, judged) == (name, verdict)
    assert says in sentence


def test_a_dpu_and_how_to_see_its_mode(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.write("sys/bus/pci/devices/0000:41:00.0/device", "0xa2dc")
    root.write("sys/class/infiniband/mlx5_0/fw_ver", "32.42.1000")
    ((name, _, sentence),) = found(root)
    assert name == "dpu mlx5_0"
    assert "BlueField-3, firmware 32.42.1000: `sudo mlxconfig -d 0000:41:00.0 q INTERNAL_CPU_" in sentence


def test_what_device_plugins_gave_a_pod(root: FakeRoot) -> None:
    env = {"PCIDEVICE_NVIDIA_COM_RDMA": "0000:41:00.0", "PCIDEVICE_NVIDIA_COM_RDMA_INFO": "{}"}
    ((name, _, sentence),) = found(root, **env)
    assert (name, sentence.partition(":00.0: ")[0]) == ("pod resources", "PCIDEVICE_NVIDIA_COM_RDMA=0000:41")
