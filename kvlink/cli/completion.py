# SPDX-License-Identifier: Apache-2.0
"""Completes values of options in the shell. Nothing here loads what a command needs."""

from __future__ import annotations

TRANSPORTS = ("loopback", "shm", "cma", "cuda", "verbs", "tcp")


def transport_names(incomplete: str) -> list[str]:
    """Returns what may follow the names that are written already, which commas separate."""
    before, comma, _ = incomplete.rpartition(",")
    written = before.split(",")
    names = TRANSPORTS if comma else ("all", *TRANSPORTS)
    return [f"{before}{comma}{name}" for name in names if name not in written]
