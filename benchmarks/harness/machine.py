# SPDX-License-Identifier: Apache-2.0
"""Describes the machine of a measurement; every results file begins with it."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from kvlink import __version__

_CPU = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def describe() -> dict[str, Any]:
    """Returns the machine, system, versions, and how busy other processes keep it now."""
    return {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "pinned_to": sorted(os.sched_getaffinity(0)),
        "governor": _read(_CPU) or "not visible",
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "transparent_hugepage": _read(_PAGES),
        "tcp_congestion_control": _read(_CONGESTION),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kvlink": __version__,
        "commit": _commit(),
        "load": round(os.getloadavg()[0], 2),
    }


class OtherLoad:
    """Measures the CPU time of processes other than this one and its children since its construction."""

    def __init__(self) -> None:
        self._start = _times()

    def share(self, running_s: float = 0.0) -> float:
        """Returns their share of all CPU time.

        `running_s` is the CPU time meanwhile of children that were not yet waited for.
        """
        busy, whole, ours = (now - then for now, then in zip(_times(), self._start, strict=True))
        return max(0.0, busy - ours - running_s) / whole if whole else 0.0


def _times() -> tuple[float, float, float]:
    """Returns the busy and the total seconds of all CPUs, both with time stolen by the host, and our own seconds."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    per_s = os.sysconf("SC_CLK_TCK")
    ours = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (sum(ticks) - ticks[3] - ticks[4]) / per_s, sum(ticks) / per_s, ours


def _cpu_model() -> str:
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """Returns the commit of the checkout that holds this package, or "" for an installed package."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
