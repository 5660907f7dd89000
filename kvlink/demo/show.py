# SPDX-License-Identifier: Apache-2.0
"""Tries every transport, and prints the results, one row per transport, as a table or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvlink.demo.route import STEPS, Cluster, Route, Row
from kvlink.demo.servers import Options
from kvlink.errors import ConfigError
from kvlink.transfer.engine import host_transports, transports_here, why_not_here
from kvlink.transfer.transport_names import select

_TO_GPUS = ("cuda", "verbs", "tcp")  # the others cannot register GPU memory
_STARTING = "starting coordinator, prefill, decode and the single-process run"


def show(names: Sequence[str] | None, as_json: bool, options: Options) -> int:
    """Implements kvlink.demo.run."""
    everywhere = transports_here() if options.device != "cpu" else host_transports()
    chosen = _choose(names, everywhere, options.device)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as progress:
        rows = _try_all(chosen, progress, as_json, options)
    if not as_json:
        print_table(rows, Console())
        absent = {} if names is not None else {name: why for name, why in everywhere.items() if why}
        print_verdict(rows, absent, Console())
    return 0 if all(row.good for row in rows) else 1


def _choose(names: Sequence[str] | None, everywhere: Mapping[str, str], device: str) -> list[str]:
    """Returns the transports to try. None chooses all that can work here. Raises ConfigError."""
    why_not = everywhere if device == "cpu" else {name: everywhere[name] for name in _TO_GPUS}
    if names is None:
        return [name for name, reason in why_not.items() if not reason]
    chosen = select(",".join(names), list(why_not))
    for name in chosen:
        bare = name.removeprefix("fault+")
        if reason := why_not[bare] if bare in why_not else why_not_here(bare):
            raise ConfigError(f"--transport {name} cannot work here: {reason}")
    return list(chosen)


def _try_all(chosen: Sequence[str], progress: Progress, as_json: bool, options: Options) -> list[Row]:
    rows = []
    task = progress.add_task(_STARTING, total=None)

    def say(what: str) -> None:
        progress.update(task, description=what)
        if not as_json and not progress.console.is_terminal:
            print(f"{what} …", file=sys.stderr, flush=True)

    say(_STARTING)
    with Cluster(options) as cluster:
        coordinator = cluster.start()
        progress.update(task, total=len(chosen) * STEPS)
        for done, transport in enumerate(chosen):
            say(transport)
            progress.update(task, completed=done * STEPS)
            route = Route(transport, *cluster.hosts(transport), lambda: progress.advance(task), options)
            rows.append(route.try_out(coordinator, cluster.expected))
            if as_json:
                print(json.dumps(asdict(rows[-1])), flush=True)
    return rows


def print_verdict(rows: Sequence[Row], absent: Mapping[str, str], console: Console) -> None:
    """Prints the overall result and the command to run next."""
    for transport, reason in absent.items():
        console.print(f"not on this machine: {transport}: {escape(reason)}", highlight=False, soft_wrap=True)
    bad = [row.transport for row in rows if not row.good]
    if bad:
        verdict = f"[bold red]FAILED[/] over {', '.join(bad)}. Next: kvlink doctor"
    else:
        fastest = max(rows, key=lambda row: row.gib_per_s)
        verdict = (
            f"[bold green]OK[/]: {sum(row.tokens for row in rows)} tokens, each as in the single-process run, over "
            f"{len(rows)} transport{'s' if len(rows) > 1 else ''}.\n"
            f"Next: kvlink bench pull --transport {fastest.transport}, or kvlink doctor for what would be faster here"
        )
    console.print(verdict, highlight=False, soft_wrap=True)


def print_table(rows: Sequence[Row], console: Console) -> None:
    """Prints the engine, the table with the columns of Row, the path of every transport, then the errors."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("transport", "path"):
        table.add_column(name, no_wrap=True)
    for name in ("processes", "prompts", "MiB", "p50 µs", "GiB/s", "tokens equal"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.transport,
            row.path or "-",
            f"{row.processes}",
            f"{row.prompts}",
            f"{row.bytes / 2**20:.2f}",
            f"{row.p50_us:,.0f}",
            f"{row.gib_per_s:.2f}",
            f"[green]yes, {row.tokens}[/]" if row.tokens_equal else "[bold red]no[/]",
        )
    for engine in dict.fromkeys(row.engine for row in rows if row.engine):
        console.print(engine, highlight=False)
    console.print(table)
    notes = [escape(row.explanation) for row in rows if row.explanation]
    errors = [f"[bold red]{row.transport} failed:[/] {escape(row.error)}" for row in rows if row.error]
    for line in notes + errors:
        console.print(line, highlight=False, soft_wrap=True)
