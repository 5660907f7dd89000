# SPDX-License-Identifier: Apache-2.0
"""Parses arguments of `kvlink bench` that hold several values."""

from __future__ import annotations

import typer

from kvlink.config import WorkerConfig
from kvlink.transfer.transport_names import select


def names_of(transport: str) -> list[str]:
    """Returns the transports of an option; "all" means every one that works here and KVLINK_TRANSPORTS allows."""
    from kvlink.transfer.engine import host_transports

    here = host_transports()
    if transport != "all":
        return select(transport, list(here))
    allowed = select(WorkerConfig.from_env().transports, list(here))
    return [name for name in allowed if not here[name.removeprefix("fault+")]]


def numbers_of(listed: str, option: str) -> list[int]:
    """Parses numbers separated by commas. Raises BadParameter for anything else."""
    counts = [int(count) if count.isdecimal() else 0 for count in listed.split(",")]
    if min(counts) < 1:
        raise typer.BadParameter("write numbers separated by commas, as in 1,2,3", param_hint=option)
    return counts
