# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink doctor`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kvlink.cli.checks import Json
from kvlink.errors import ConfigError

_REPORT = "kvlink-day-one.md"


def doctor(
    gpudirect: Annotated[
        bool,
        typer.Option(
            "--gpudirect",
            help="Register GPU memory with each NIC, move random bytes both ways, and compare them.",
        ),
    ] = False,
    day_one: Annotated[
        bool,
        typer.Option(
            "--day-one",
            help="Run every check and benchmark that one host with a GPU or an RDMA NIC can run, which takes minutes, "
            "and write one report.",
        ),
    ] = False,
    report: Annotated[
        str,
        typer.Option(metavar="FILE", help=f"Write the report of --day-one to this new file. [{_REPORT}]"),
    ] = "",
    as_json: Json = False,
) -> None:
    """Check what works on this machine. Show the evidence, and the command that fixes what does not.

    Run it in the same container and as the same user as the server. The exit status is 1 if a check fails.
    """
    if day_one and not gpudirect:
        _day_one(Path(report or _REPORT))
        return
    if report or day_one:
        raise ConfigError("give --day-one without --gpudirect" if day_one else "--report needs --day-one")

    from kvlink.cli import tables
    from kvlink.doctor import Verdict, examine, worst

    if gpudirect:
        from kvlink.doctor.trial import trial

        checks = list(trial())
    else:
        checks = list(examine(Path("/"), os.environ))
    tables.show_checks(checks, as_json)
    raise typer.Exit(1 if worst(checks) is Verdict.FAIL else 0)


def _day_one(report: Path) -> None:
    from kvlink.doctor.day_one import steps, write
    from kvlink.hardware.topology import discover

    machine = discover()
    for line in write(report, list(steps(len(machine.gpus), [nic.name for nic in machine.nics]))):
        print(line, flush=True)
