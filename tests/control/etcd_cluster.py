# SPDX-License-Identifier: Apache-2.0
"""The etcd that tests start, or why they do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvlink.benchmarks.etcd import EtcdCluster
from kvlink.control.security import TlsFiles

__all__ = ["EtcdCluster", "need_etcd", "start_etcd"]

_MEMORY = Path("/dev/shm")


def need_etcd() -> None:
    """Skips the test where there is none."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd on this machine: apt-get install etcd-server")


def start_etcd(num_members: int = 1, tls: TlsFiles | None = None) -> EtcdCluster:
    """In memory where that is possible: tests are not about its disk."""
    need_etcd()
    return EtcdCluster(num_members, _MEMORY if _MEMORY.is_dir() else None, tls)
