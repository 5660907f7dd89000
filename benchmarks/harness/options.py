# SPDX-License-Identifier: Apache-2.0
"""Defines options that several commands have, and parses those that hold several values."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import typer

from kvlink.cli.checks import transport_names
from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.transfer.transport_names import select

_MOST, _MOST_CPUS = 1e9, 4096
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")]
Transport = Annotated[
    str,
    typer.Option(
        help="Measure these transports: names separated by commas, or all.", autocompletion=transport_names
    ),
]


def _model_names() -> list[str]:
    from ..workloads.grouped_models import GROUPED_MODELS
    from ..workloads.models import MODELS

    return [*MODELS, *GROUPED_MODELS]


ModelName = Annotated[
    str,
    typer.Option(
        help="Use the KV geometry of this model, or of a Hugging Face config.json: its path.",
        autocompletion=_model_names,
    ),
]
Iters = Annotated[int | None, typer.Option(min=1, help="Measure this many pulls; by default by size.")]
BlockOrder = Annotated[
    str,
    typer.Option(
        help="Choose block ids in this order: random, or runs:K, runs of K blocks at random places."
    ),
]
Memory = Annotated[
    str,
    typer.Option(
        help="Use this kind of memory: own (kvlink allocates it), or memory of others: anonymous (in pages of 4 KiB) "
        "or huge (in huge pages on request). [own; huge for cma]"
    ),
]
Cpus = Annotated[
    str, typer.Option(help="Run all processes on these CPUs, as in 0,1 or 0-3. [those of this process]")
]
Nics = Annotated[int, typer.Option(min=1, max=1024, help="Use this many NICs on each side, for all ranks.")]
Gbps = Annotated[float, typer.Option(min=0.1, help="Use NICs of this many Gb/s.")]


def names_of(transport: str) -> list[str]:
    """Returns the transports of an option; "all" means every one that works here and KVLINK_TRANSPORTS allows."""
    from kvlink.transfer.engine import host_transports

    here = host_transports()
    if transport != "all":
        return select(transport, list(here))
    allowed = select(WorkerConfig.from_env().transports, list(here))
    return [name for name in allowed if not here[name.removeprefix("fault+")]]


def numbers_of(listed: str, option: str) -> list[int]:
    """Parses whole numbers above zero, separated by commas. Raises BadParameter for anything else."""
    return list(map(int, rates_of(listed, option, int)))


def rates_of(listed: str, option: str, parse: Callable[[str], float] = float) -> list[float]:
    """Parses numbers above zero, separated by commas. Raises BadParameter for anything else."""
    try:
        found = list(map(parse, listed.split(",")))
        if all(0 < each < _MOST for each in found):
            return found
    except ValueError:
        pass
    raise typer.BadParameter("write numbers separated by commas, as in 1,2,3", param_hint=option)


def use_cpus(cpus: str) -> str:
    """Keeps this process and those that it starts to these CPUs. Returns the CPUs in use. Raises ConfigError."""
    if cpus:
        try:
            ends = [[int(end) for end in part.split("-", 1)] for part in cpus.split(",")]
            os.sched_setaffinity(
                0, {cpu for part in ends for cpu in range(part[0], min(part[-1], _MOST_CPUS) + 1)}
            )
        except (ValueError, OSError, OverflowError) as error:
            raise ConfigError(
                f"--cpus {cpus!r} is not usable here ({error}); write CPUs as in 0,1 or 0-3"
            ) from error
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))
