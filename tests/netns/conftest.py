# SPDX-License-Identifier: Apache-2.0
"""Two hosts on one machine: network namespaces joined by a veth pair."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from netns.hosts import Host

_numbers = itertools.count(1)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """A prefill host and a decode host."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip(
            "network namespaces need root and iproute2: sudo apt-get install iproute2; sudo make test-netns"
        )
    number = next(_numbers)
    names = f"kvp{os.getpid() % 10000}{number}", f"kvd{os.getpid() % 10000}{number}"
    ends = Host(names[0], "10.79.0.1"), Host(names[1], "10.79.0.2")
    for host in ends:
        subprocess.run(["ip", "netns", "add", host.namespace], check=True)
    try:
        pair = ["type", "veth", "peer", "name", ends[1].device, "netns", ends[1].namespace]
        ends[0].run("ip", "link", "add", ends[0].device, *pair)
        for host in ends:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", host.device)
            host.run("ip", "link", "set", "lo", "up")
            host.link("up")
        yield ends
    finally:
        for host in ends:
            host.close()
            subprocess.run(["ip", "netns", "del", host.namespace], check=True)
