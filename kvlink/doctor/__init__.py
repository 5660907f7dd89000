# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, the evidence, and the command that fixes what does not.

A check only looks; it changes nothing. To add one, write a function that returns a Check in `software` (what
is installed), `host` (kernel and limits) or `network`, and name it in that module's `checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvlink.doctor import host, network, software
from kvlink.doctor.verdict import Check, Verdict

__all__ = ["Check", "Verdict", "examine", "worst"]


def examine(root: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """Runs every check, in the order shown. Kernel files are read below `root`, options from `env`."""
    yield from software.checks(root, env)
    yield from host.checks(root)
    yield from network.checks(root, env)


def worst(checks: Iterable[Check]) -> Verdict:
    """FAIL if any check failed, else WARN if any warned."""
    return max((check.verdict for check in checks), key=list(Verdict).index, default=Verdict.PASS)
