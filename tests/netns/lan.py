# SPDX-License-Identifier: Apache-2.0
"""Builds hosts on one switch from network namespaces. Links are cut pair by pair, one way or both."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

_SWITCH = "br0"


def enter(namespace: str) -> None:
    """Moves this thread to a network namespace, and so the threads and processes that it starts later."""
    # os.setns is newer than the oldest Python that is supported.
    with Path(f"/run/netns/{namespace}").open() as space:
        if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


class Lan:
    """Holds one namespace per host and one for the switch. It needs root, and skips the test otherwise."""

    def __init__(self, names: Sequence[str]) -> None:
        if os.geteuid() != 0 or not shutil.which("ip"):
            pytest.skip(
                "network namespaces need root and iproute2: sudo apt-get install iproute2; sudo make test-netns"
            )
        self._prefix = f"kvl{os.getpid() % 100_000}"
        self.names = list(names)
        self._cuts: list[tuple[str, str]] = []
        self._made: list[str] = []
        try:
            self._wire()
        except BaseException:
            self.close()
            raise

    def _wire(self) -> None:
        switch = self._add("switch")
        _ip("-n", switch, "link", "add", _SWITCH, "type", "bridge")
        _ip("-n", switch, "link", "set", _SWITCH, "up")
        for number, name in enumerate(self.names):
            space = self._add(name)
            pair = ("peer", "name", f"p{number}", "netns", switch)
            _ip("-n", space, "link", "add", "eth0", "type", "veth", *pair)
            _ip("-n", switch, "link", "set", f"p{number}", "master", _SWITCH, "up")
            _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", space, "link", "set", device, "up")
            # The kernel looks up its own addresses only after the rules that `cut` adds.
            _ip("-n", space, "rule", "add", "pref", "100", "lookup", "local")
            _ip("-n", space, "rule", "del", "pref", "0")

    def _add(self, name: str) -> str:
        space = f"{self._prefix}-{name}"
        _ip("netns", "add", space)
        self._made.append(space)
        return space

    def address(self, name: str) -> str:
        return f"10.79.1.{self.names.index(name) + 1}"

    def inside(self, name: str) -> list[str]:
        """Returns the prefix of a command that runs on this host."""
        return ["ip", "netns", "exec", f"{self._prefix}-{name}"]

    def enter(self, name: str) -> None:
        """Moves this thread to a host, and so the threads and processes that it starts later."""
        enter(f"{self._prefix}-{name}")

    def pace(self, name: str, rate: str) -> None:
        """Limits what leaves this host to a rate in tc's form. Calling again changes it."""
        shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
        subprocess.run(
            ["tc", "-n", f"{self._prefix}-{name}", "qdisc", "replace", "dev", "eth0", "root", *shape],
            check=True,
        )

    def pace_in(self, name: str, rate: str) -> None:
        """Limits what reaches this host to a rate in tc's form."""
        shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "20ms")
        port = f"p{self.names.index(name)}"
        subprocess.run(
            ["tc", "-n", f"{self._prefix}-switch", "qdisc", "replace", "dev", port, "root", *shape],
            check=True,
        )

    def receive_on(self, name: str, cpus: int) -> None:
        """Has packets for this host handled by the CPUs of a mask, and not by the CPU of their sender."""
        port = f"p{self.names.index(name)}"
        for space, device in ((name, "eth0"), ("switch", port)):
            steering = f"/sys/class/net/{device}/queues/rx-0/rps_cpus"
            inside = ["ip", "netns", "exec", f"{self._prefix}-{space}"]
            subprocess.run([*inside, "sh", "-c", f"echo {cpus:x} > {steering}"], check=True)

    def cut(self, source: str, *targets: str, both: bool = False) -> None:
        """Drops silently what each of `targets` receives from `source`. `both` also drops the other direction."""
        for target in targets:
            for sender, receiver in [(source, target), (target, source)][: 1 + both]:
                self._rule("add", sender, receiver)
                self._cuts.append((sender, receiver))

    def mend(self) -> None:
        """Restores all links."""
        while self._cuts:
            self._rule("del", *self._cuts.pop())

    def _rule(self, change: str, sender: str, receiver: str) -> None:
        space, address = f"{self._prefix}-{receiver}", self.address(sender)
        _ip("-n", space, "rule", change, "pref", "10", "from", address, "blackhole")

    def close(self) -> None:
        """Deletes the namespaces, whose processes must have ended. Closing again has no effect."""
        while self._made:
            _ip("netns", "del", self._made.pop())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
