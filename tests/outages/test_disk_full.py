# SPDX-License-Identifier: Apache-2.0
"""The disk under etcd fills up: etcd ends, calls wait or are refused as retryable, and a start with room heals all."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from control.etcd_cluster import EtcdCluster, need_etcd, need_etcdctl
from outages.programs import Coordinator, LoadProcess, Program
from outages.scene import Scene, make_token, secrets_of, ticket_secret
from waiting import eventually

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of which etcd's log takes most."""
    if os.geteuid() != 0:
        pytest.skip("a small disk is a tmpfs, and mounting needs root: sudo make test-processes")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "kvlink-test", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


class Disk:
    """The file system under etcd, which `fill` fills until etcd ends and `heal` empties again."""

    def __init__(self, root: Path, etcd: EtcdCluster) -> None:
        self._ballast, self._etcd = root / "ballast", etcd

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        (pid,) = self._etcd.pids
        with contextlib.suppress(subprocess.CalledProcessError):
            while not ended(pid):
                self._etcd.control("put", "more", "x" * 100_000)
        eventually(lambda: ended(pid))

    def heal(self) -> None:
        self._etcd.kill(0)
        self._ballast.unlink()
        self._etcd.start(0)
        self._etcd.wait()


def test_it_is_refused_and_heals(small_disk: Path, tmp_path: Path) -> None:
    need_etcd()
    need_etcdctl()
    logs = tmp_path / "logs"
    logs.mkdir()
    token = make_token(logs)
    programs: list[Program] = []
    etcd = EtcdCluster(1, small_disk)
    try:
        for name in ("a", "b"):
            store = f"etcd://{etcd.addresses}/disk"
            programs.append(
                Coordinator(logs, name, store, (), "--lease-s", "20", KVLINK_TOKEN_FILE=str(token))
            )
        addresses = ",".join(program.said.rpartition(" ")[2] for program in programs)
        load = LoadProcess(logs, addresses, ticket_secret(token), KVLINK_TOKEN_FILE=str(token))
        programs.append(load)
        scene = Scene(logs, programs[:-1], load, secrets_of(token))
        disk = Disk(small_disk, etcd)
        seen = scene.disturb(disk.fill, disk.heal, 8.0)
        assert set(seen.totals.refused) <= {"CoordinatorUnavailable"}
        assert seen.within(20.0)
        assert load.finish().lost == []
        scene.check_logs()
    finally:
        for program in programs:
            program.kill()
        etcd.close()


def ended(pid: int) -> bool:
    """It waits to be asked for its status."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
