# SPDX-License-Identifier: Apache-2.0
"""One host of a test: a network namespace, and processes in pid namespaces of their own."""

from __future__ import annotations

import subprocess

import pytest
from transports.processes import PeerProcess


class Host:
    """One end of the link."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self.device = f"{namespace}-0"
        self._peers: list[PeerProcess] = []

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command], check=True, text=True, capture_output=True
        )

    def start(self, **env: str) -> PeerProcess:
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--pid", "--fork", "--kill-child"]
        self._peers.append(PeerProcess(inside, KVLINK_HOST=self.address, KVLINK_INSECURE="1", **env))
        return self._peers[-1]

    def link(self, state: str) -> None:
        """up or down."""
        self.run("ip", "link", "set", self.device, state)

    def shape(self, *discipline: str) -> None:
        """Slows what leaves this host, as `tc qdisc add … root`. Skips when the kernel has not got it."""
        try:
            self.run("tc", "qdisc", "add", "dev", self.device, "root", *discipline)
        except subprocess.CalledProcessError as error:
            if "unknown" in error.stderr:
                pytest.skip(f"the kernel has no qdisc {discipline[0]}: modprobe sch_{discipline[0]}")
            raise

    def close(self) -> None:
        for peer in self._peers:
            peer.kill()
