# SPDX-License-Identifier: Apache-2.0
"""Checks what works on this machine, with the evidence and the command that fixes what does not.

A check only reads; it changes nothing. To add one, write a function that returns a Check in `software` (what is
installed), `host` (kernel and limits), `network`, `certificates`, `verbs` and `rdma` (NICs), `gpudirect` or `stacks`
(drivers around GPUs and NICs), and add it to that module's `checks`. Only `trial` moves data: it reads GPU memory
through each NIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvlink.doctor import certificates, gpudirect, host, network, rdma, software, stacks, verbs
from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware import device_caps
from kvlink.hardware.topology import discover

__all__ = ["Check", "Verdict", "examine", "worst"]


def examine(root: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """Runs every check, in the order in which they are shown.

    Kernel files are read below `root`, options come from `env`.
    """
    yield from software.checks(root, env)
    yield from host.checks(root)
    yield from network.checks(root, env)
    yield from certificates.checks(env)
    machine = discover(root)
    active_mtus = {caps.device: caps.active_mtu_bytes for caps in device_caps.query(machine.nics).caps}
    yield from rdma.checks(root, machine.nics, active_mtus, env=env)
    yield from verbs.checks(root, machine.nics)
    yield from gpudirect.checks(root, machine.gpus, machine.nics)
    yield from stacks.checks(root, machine.nics, env)


def worst(checks: Iterable[Check]) -> Verdict:
    """Returns FAIL if any check failed, else WARN if any warned, else PASS."""
    return max((check.verdict for check in checks), key=list(Verdict).index, default=Verdict.PASS)
