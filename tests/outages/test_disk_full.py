# SPDX-License-Identifier: Apache-2.0
"""The disk under a member of etcd fills up, and the member ends. A start with room on the disk mends it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from control.etcd_cluster import EtcdCluster, need_etcdctl
from outages.scene import on_loopback
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
    """Holds the data of one member. `fill` fills it until that member ends, `heal` empties it and starts the member."""

    def __init__(self, root: Path, etcd: EtcdCluster, number: int) -> None:
        self._ballast, self._etcd, self._number = root / "ballast", etcd, number

    def fill(self) -> None:
        with contextlib.suppress(OSError), self._ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        pid = self._etcd.pids[self._number]
        with contextlib.suppress(subprocess.CalledProcessError):
            while not ended(pid):
                self._etcd.control("put", "more", "x" * 100_000)
        eventually(lambda: ended(pid))

    def heal(self) -> None:
        self._etcd.kill(self._number)
        self._ballast.unlink()
        self._etcd.start(self._number)
        self._etcd.wait()


def test_the_disk_of_a_single_etcd_is_full(small_disk: Path, tmp_path: Path) -> None:
    """The members' calls wait or are refused as retryable while etcd is down."""
    need_etcdctl()
    with on_loopback(tmp_path, 1) as (scene, etcd):
        move(etcd, 0, small_disk)
        disk = Disk(small_disk, etcd, 0)
        seen = scene.disturb(disk.fill, disk.heal, 8.0)
    assert set(seen.totals.refused) <= {"CoordinatorUnavailable"}
    assert seen.within(20.0)


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_the_disk_of_one_member_of_three_is_full(small_disk: Path, tmp_path: Path, leads: bool) -> None:
    """The other two members go on."""
    need_etcdctl()
    with on_loopback(tmp_path, 3) as (scene, etcd):
        number = etcd.leader() if leads else (etcd.leader() + 1) % 3
        move(etcd, number, small_disk)
        if leads:
            etcd.lead(number)
        assert (etcd.leader() == number) == leads
        disk = Disk(small_disk, etcd, number)
        seen = scene.disturb(disk.fill, disk.heal, 8.0)
    assert not seen.totals.refused
    assert seen.within(8.0)


def move(etcd: EtcdCluster, number: int, disk: Path) -> None:
    """Moves the data of one member to another file system."""
    etcd.kill(number)
    data = etcd.data(number)
    shutil.move(data, disk / "data")
    data.symlink_to(disk / "data")
    etcd.start(number)
    etcd.wait()


def ended(pid: int) -> bool:
    """It waits to be asked for its status."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
