# SPDX-License-Identifier: Apache-2.0
"""Which tests are in the gate. CONTRIBUTING.md describes the tiers; the rule against luck reads this file, too."""

from __future__ import annotations

from collections.abc import Collection

# Folders under tests/ whose tests run in other processes, containers, namespaces or devices, in real time.
OUTSIDE_FOLDERS = frozenset(
    {
        "demo",
        "deploy",
        "engines",
        "gpu",
        "hostile_peers",
        "netns",
        "newcomer",
        "nixl",
        "outages",
        "pages",
        "softroce",
        "soak",
        "transports",
    }
)

# Marks of single tests, classes and modules that need real time.
OUTSIDE_MARKS = frozenset({"engines", "netns", "newcomer", "slow", "softroce", "verify"})

# Fixtures that start an etcd or a coordinator as processes.
OUTSIDE_FIXTURES = frozenset({"cluster", "coordinator_process", "etcd", "etcd_cluster", "fleet", "served"})


def is_outside(folder: str, marks: Collection[str], fixtures: Collection[str]) -> bool:
    """Returns whether a test of tests/`folder` is left to `make verify` or to a lane of its own."""
    return (
        folder in OUTSIDE_FOLDERS
        or not OUTSIDE_MARKS.isdisjoint(marks)
        or not OUTSIDE_FIXTURES.isdisjoint(fixtures)
    )
