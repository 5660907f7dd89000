# SPDX-License-Identifier: Apache-2.0
"""The etcd that tests start, or why they do not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvlink.benchmarks.harness.etcd import EtcdCluster
from kvlink.control.security import TlsFiles
from kvlink.coordinator.store import etcd
from kvlink.coordinator.store.etcd import api, sync

__all__ = ["EtcdCluster", "give_etcd_time", "need_etcd", "need_etcdctl", "start_etcd"]

_MEMORY = Path("/dev/shm")


def need_etcd() -> None:
    """Skips the test where there is none."""
    if shutil.which("etcd") is None:
        pytest.skip("no etcd on this machine: apt-get install etcd-server")


def need_etcdctl() -> None:
    """Skips the test where there is none."""
    if shutil.which("etcdctl") is None:
        pytest.skip("no etcdctl on this machine: apt-get install etcd-client")


def give_etcd_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To stores of this process: one that answers late is not away."""
    monkeypatch.setattr(api, "_ATTEMPT_S", 30.0)
    monkeypatch.setattr(api, "_PATIENCE_S", 30.0)
    monkeypatch.setattr(etcd, "_LOADING_S", 30.0)
    monkeypatch.setattr(sync, "_STALE_S", 30.0)


def start_etcd(num_members: int = 1, tls: TlsFiles | None = None, **options: str) -> EtcdCluster:
    """In memory where that is possible: tests are not about its disk."""
    need_etcd()
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return EtcdCluster(num_members, _MEMORY if _MEMORY.is_dir() else None, tls, named)
