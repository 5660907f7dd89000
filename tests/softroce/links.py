# SPDX-License-Identifier: Apache-2.0
"""The guest's links: rxeN is on nicN (see `devices`). What is done to one, or to who uses it, ends with its `with`."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_DEVICES = Path("/sys/class/infiniband")
_NODES = Path("/sys/class/infiniband_verbs")
_CGROUPS = Path("/sys/fs/cgroup")


def netdev(device: str) -> str:
    return "lo" if device == "rxe0" else device.replace("rxe", "nic")


@contextlib.contextmanager
def down(device: str) -> Iterator[None]:
    """Its port is down, and whoever watches its async events receives the event at once."""
    _ip("link", "set", netdev(device), "down")
    try:
        yield
    finally:
        _mend(device, "down")


@contextlib.contextmanager
def removed(device: str) -> Iterator[None]:
    """The device itself is gone. Waits, as the kernel does, until all who had it open have closed it."""
    removing = subprocess.Popen(["rdma", "link", "delete", device])  # which nothing ends before
    assert removing.wait(60) == 0
    try:
        yield
    finally:
        _mend(device, "removed")


@contextlib.contextmanager
def lost(device: str, how: str) -> Iterator[float]:
    """As `down` or `removed`, while its users find out. Yields when the kernel has begun, by `time.monotonic()`."""
    node = _node(device)
    taking = {
        "down": ["ip", "link", "set", netdev(device), "down"],
        "removed": ["rdma", "link", "delete", device],
    }
    began: Callable[[], bool] = {
        "down": lambda: device not in active(),
        "removed": lambda: not node.exists(),
    }[how]
    running = subprocess.Popen(taking[how])
    while not began():
        time.sleep(0.001)
    try:
        yield time.monotonic()
    finally:
        assert running.wait(60) == 0
        _mend(device, how)


def _node(device: str) -> Path:
    (node,) = (each.parent for each in _NODES.glob("uverbs*/ibdev") if each.read_text().strip() == device)
    return node


def _mend(device: str, how: str) -> None:
    if how == "down":
        _ip("link", "set", netdev(device), "up")
    else:
        subprocess.run(["rdma", "link", "add", device, "type", "rxe", "netdev", netdev(device)], check=True)


@contextlib.contextmanager
def impaired(device: str, *discipline: str) -> Iterator[None]:
    """`impaired("rxe1", "netem", "delay", "5ms")` slows what rxe1 sends to other devices."""
    queue = ["tc", "qdisc", "add", "dev", netdev(device), "root"]
    subprocess.run([*queue, *discipline], check=True)
    try:
        yield
    finally:
        subprocess.run([*queue[:2], "del", *queue[3:]], check=True)


@contextlib.contextmanager
def dropping(device: str, most_bytes: int) -> Iterator[None]:
    """Larger packets that the device sends get lost, as in a switch without jumbo frames."""
    at = ("dev", netdev(device))
    _tc("qdisc", "add", *at, "clsact")
    try:
        police = ("police", "rate", "10gbit", "burst", "100m", "mtu", str(most_bytes), "drop")
        _tc("filter", "add", *at, "egress", "matchall", "action", *police)
        yield
    finally:
        _tc("qdisc", "del", *at, "clsact")


@contextlib.contextmanager
def unresolved(device: str) -> Iterator[None]:
    """Nobody finds out to which interface the device's address belongs: it does not answer ARP."""
    setting = f"net.ipv4.conf.{netdev(device)}.arp_ignore"
    subprocess.run(["sysctl", "-qw", f"{setting}=8"], check=True)
    _ip("neigh", "flush", "all")
    try:
        yield
    finally:
        subprocess.run(["sysctl", "-qw", f"{setting}=1"], check=True)
        _ip("neigh", "flush", "all")


@contextlib.contextmanager
def rails_apart(addresses: Mapping[str, str]) -> Iterator[None]:
    """These devices have other addresses, and those of one network do not reach those of another."""
    moved = {netdev(device): address for device, address in addresses.items()}
    interfaces = [netdev(f"rxe{number}") for number in range(1, 5)]
    try:
        for interface in interfaces:  # 2: answers ARP only within its own network
            subprocess.run(["sysctl", "-qw", f"net.ipv4.conf.{interface}.arp_ignore=2"], check=True)
        for interface, address in moved.items():
            _ip("address", "flush", "dev", interface)
            _ip("address", "add", f"{address}/24", "dev", interface)
        _ip("neigh", "flush", "all")
        yield
    finally:
        for interface in interfaces:
            subprocess.run(["sysctl", "-qw", f"net.ipv4.conf.{interface}.arp_ignore=1"], check=True)
        for interface in moved:
            _ip("address", "flush", "dev", interface)
            _ip("address", "add", f"10.0.1.{interface.removeprefix('nic')}/24", "dev", interface)
        _ip("neigh", "flush", "all")


@contextlib.contextmanager
def pods(device: str, *addresses: str) -> Iterator[list[str]]:
    """One more device, shared by network namespaces with an interface and an IPv4 address each. Yields their names."""
    names = [f"pod{number}" for number in range(len(addresses))]
    _ip("link", "add", "shared", "mtu", "4500", "up", "type", "dummy")
    try:
        subprocess.run(["rdma", "link", "add", device, "type", "rxe", "netdev", "shared"], check=True)
        for name, address in zip(names, addresses, strict=True):
            _ip("netns", "add", name)
            _ip("link", "add", name, "link", "shared", "netns", name, "type", "macvlan", "mode", "bridge")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "address", "add", f"{address}/24", "dev", name)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)
        subprocess.run(["rdma", "link", "delete", device], check=False)
        _ip("link", "del", "shared")


@contextlib.contextmanager
def limited(device: str, pid: int, num_objects: int) -> Iterator[None]:
    """The kernel gives a process at most so many further objects of a device: queue pairs, regions…"""
    group = _CGROUPS / f"limited-{pid}"
    (_CGROUPS / "cgroup.subtree_control").write_text("+rdma")
    group.mkdir()
    try:
        (group / "rdma.max").write_text(f"{device} hca_object={num_objects}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (_CGROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def devices() -> set[str]:
    return {device.name for device in _DEVICES.glob("*")}


def active() -> set[str]:
    """The devices whose port is up."""
    return {device for device in devices() if "ACTIVE" in (_DEVICES / device / "ports/1/state").read_text()}


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True)
