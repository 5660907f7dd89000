# SPDX-License-Identifier: Apache-2.0
"""`kvlink doctor --gpudirect`: what it says where parts are missing, and its comparison over memory that is here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hardware import machines
from hardware.fake_cuda import HOPPER
from hardware.fake_root import GPU, FakeRoot

from kvlink.config.nic_options import Way
from kvlink.doctor import Verdict, trial
from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import Allocation, Gpu, Kind
from kvlink.hardware.topology import discover

PASS, FAIL = Verdict.PASS, Verdict.FAIL


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
