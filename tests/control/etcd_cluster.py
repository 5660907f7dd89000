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

__all__ = ["EtcdCluster", "RestorableEtcd", "give_etcd_time", "need_etcd", "need_etcdctl", "start_etcd"]

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


class RestorableEtcd(EtcdCluster):
    """A cluster that loses its data, or returns to earlier ones."""

    def wipe(self) -> None:
        """Kills all members, deletes their data and starts them again."""
        for number in range(len(self._members)):
            self.kill(number)
            shutil.rmtree(self.data(number))
        self._start_all()

    def save(self) -> Path:
        """Takes a snapshot by etcdctl and returns its path."""
        path = self._folder / f"snapshot-{len(list(self._folder.glob('snapshot-*')))}"
        self.control("snapshot", "save", str(path))
        return path

    def restore(self, snapshot: Path) -> None:
        """Kills all members and starts them with the content of a snapshot."""
        for number, peer in enumerate(self._peers):
            self.kill(number)
            shutil.rmtree(self.data(number))
            places = {
                "name": f"m{number}",
                "data-dir": str(self.data(number)),
                "initial-cluster": self._everyone,
                "initial-advertise-peer-urls": f"http://127.0.0.1:{peer}",
            }
            self.control(
                "snapshot", "restore", str(snapshot), *(f"--{name}={at}" for name, at in places.items())
            )
        self._start_all()


def start_etcd(num_members: int = 1, tls: TlsFiles | None = None, **options: str) -> RestorableEtcd:
    """In memory where that is possible: tests are not about its disk."""
    need_etcd()
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return RestorableEtcd(num_members, _MEMORY if _MEMORY.is_dir() else None, tls, named)
