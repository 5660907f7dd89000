# SPDX-License-Identifier: Apache-2.0
"""`kvlink topology`: the tables for people and the object for programs, and what pyverbs adds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hardware import machines
from hardware.machines import DOWN, Machine

from kvlink.cli.topology import show
from kvlink.errors import ConfigError
from kvlink.hardware.device_caps import query
from kvlink.hardware.topology import RdmaDevice


def test_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    machines.hgx_pairs(tmp_path).discover()
    show("", as_json=False, root=tmp_path)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "mlx5_0:1 ACTIVE InfiniBand 200 0000:18:00.0 504 0 28.39.1002" in lines
    assert "mlx5_0:1 0 fe80::a3f:d2ff:fe06:1 IB/RoCE v1 used" in lines
    assert "GPU 0000:16:00.0 PIX NODE SYS SYS mlx5_0:1" in lines
    assert "node 1 SYS SYS PHB PHB mlx5_2:1, mlx5_3:1" in lines
    assert any(line.startswith("NVLink and C2C are not in sysfs") for line in lines)


def test_a_gpu_far_from_its_nic_and_a_port_without_a_link_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machines.cloud_vm(tmp_path).nic("mlx5_2", "", 0, DOWN)
    show("", as_json=False, root=tmp_path)
    shown = capsys.readouterr().out
    assert "\n  mlx5_0:1 is PHB from GPU 0000:11:00.0: bytes pass through the CPU" in shown
    assert "\n  mlx5_2:1 is DOWN (physically Disabled); check the cable" in shown


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machines.cloud_vm(tmp_path)
    show("mlx5_1", as_json=True, root=tmp_path)
    row = json.loads(capsys.readouterr().out)
    assert [nic["ports"][0]["state"] for nic in row["nics"]] == ["ACTIVE", "ACTIVE"]
    assert row["nics"][0]["ports"][0]["gids"][3]["kind"] == "RoCE v2"
    gpu = row["places"][0]
    assert gpu["place"] == "GPU 0000:11:00.0"
    assert gpu["distances"] == {"mlx5_0": "PHB", "mlx5_1": "PHB"}
    assert [(nic["device"], nic["link_layer"], nic["distance"]) for nic in gpu["chosen"]] == [
        ("mlx5_1", "Ethernet", "PHB")
    ]
    assert [refused["reason"] for refused in gpu["refused"]] == ["is excluded by KVLINK_NICS"]
    assert row["verbs"]["fix"]


def test_a_machine_without_nics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Machine(tmp_path)
    show("", as_json=False, root=tmp_path)
    assert "no RDMA device" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="KVLINK_NICS names mlx5_0"):
        show("mlx5_0", as_json=False, root=tmp_path)


def test_without_pyverbs_the_report_says_how_to_get_it() -> None:
    program = (
        "import sys\n"
        "sys.modules['pyverbs'] = None\n"
        "from kvlink.hardware.device_caps import query\n"
        "report = query([])\n"
        "assert report.caps == () and 'cannot be imported' in report.problem, report\n"
        "assert report.fix.startswith('apt-get install python3-pyverbs'), report\n"
        "assert '/usr/lib/python3/dist-packages' not in sys.path\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_devices_that_do_not_answer_share_one_sentence() -> None:
    if query([]).problem:
        pytest.skip("no pyverbs for this Python; apt-get install python3-pyverbs")
    absent = [RdmaDevice(f"absent{n}", None, "", "", "", False, ()) for n in range(2)]
    report = query(absent)
    assert report.caps == ()
    assert report.problem.startswith("absent0, absent1: ") or "; absent1: " in report.problem
    assert "uverbs" in report.fix
