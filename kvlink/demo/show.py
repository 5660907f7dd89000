# SPDX-License-Identifier: Apache-2.0
"""Runs the whole demo: starts the processes, computes the expected tokens, tries every transport, prints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvlink.demo.cluster import Cluster
from kvlink.demo.options import Options
from kvlink.demo.router import STEPS, Route
from kvlink.demo.table import Row, print_json, print_table, print_verdict
from kvlink.demo.transports import absent_here, choose


def show(
    names: Sequence[str] | None,
    json: bool,
    options: Options,
) -> int:
    """Implements kvlink.demo.run."""
    chosen = choose(names, options.device)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=json) as progress:
        rows = _try_all(chosen, progress, json, options)
    if not json:
        print_table(rows, Console())
        absent = {} if names is not None else absent_here(options.device)
        print_verdict(rows, absent, Console())
    return 0 if all(row.good for row in rows) else 1


def _try_all(
    chosen: Sequence[str],
    progress: Progress,
    json: bool,
    options: Options,
) -> list[Row]:
    rows = []
    quiet = not json and not progress.console.is_terminal
    if quiet:
        print(
            "starting coordinator, prefill, decode and the single-process run …", file=sys.stderr, flush=True
        )
    task = progress.add_task("starting coordinator, prefill, decode and the single-process run", total=None)
    with Cluster(options) as cluster:
        coordinator = cluster.wait_ready()
        progress.update(task, total=len(chosen) * STEPS)
        for done, transport in enumerate(chosen):
            if quiet:
                print(f"{transport} …", file=sys.stderr, flush=True)
            progress.update(task, description=transport, completed=done * STEPS)
            hosts = cluster.hosts(transport)
            route = Route(transport, *hosts, lambda: progress.advance(task), options)
            rows.append(route.try_out(coordinator, cluster.expected))
            if json:
                print_json(rows[-1])
    return rows
