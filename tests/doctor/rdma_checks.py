# SPDX-License-Identifier: Apache-2.0
"""Runs the checks of RDMA devices on a fake machine."""

from __future__ import annotations

from hardware.fake_root import FakeRoot

from kvlink.doctor import rdma
from kvlink.doctor.verdict import Check
from kvlink.hardware.topology import RdmaDevice, discover


def nics(root: FakeRoot) -> tuple[RdmaDevice, ...]:
    return discover(root.path).nics


def silent(*command: str) -> str:
    return ""


def found(root: FakeRoot) -> dict[str, Check]:
    return {check.name: check for check in rdma.checks(root.path, nics(root), {}, silent)}
