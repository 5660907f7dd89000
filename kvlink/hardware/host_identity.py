# SPDX-License-Identifier: Apache-2.0
"""Identifies the machine and the namespaces of this process."""

from __future__ import annotations

import os
from pathlib import Path

from kvlink.hardware.sysfs import read
from kvlink.types import HostIdentity


def this_host() -> HostIdentity:
    """Reads the identity from /proc. A field that a container hides is 0 or empty and never equals that of a peer."""
    return HostIdentity(
        boot_id=read(Path("/"), "proc/sys/kernel/random/boot_id"),
        pid_namespace=_inode(Path("/proc/self/ns/pid")),
        net_namespace=_inode(Path("/proc/self/ns/net")),
        pid=os.getpid(),
        uid=os.geteuid(),
    )


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return 0
