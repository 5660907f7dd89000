# SPDX-License-Identifier: Apache-2.0
"""Prints the results of the demo, one row per transport, as a table or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one transport. `bytes`, `p50_us` and `gib_per_s` are of the longest prompt, pulled repeatedly."""

    engine: str
    """The engine that prefilled and decoded."""
    transport: str
    path: str
    """The transport that carried the bytes, as the pull reports it."""
    processes: int
    """2, or 1 if both roles share a process because the transport does not leave it."""
    prompts: int
    tokens: int
    """The number of generated tokens that were compared with the single-process run."""
    bytes: int
    p50_us: float
    gib_per_s: float
    tokens_equal: bool
    error: str = ""
    """Why the row is bad, or ""."""
    explanation: str = ""
    """The `pull.explain()` of the longest prompt."""

    @property
    def good(self) -> bool:
        """Returns whether tokens are equal and nothing else failed."""
        return self.tokens_equal and not self.error


def failed(transport: str, error: str) -> Row:
    """Returns the row of a transport that failed before it produced tokens."""
    return Row("", transport, "", 0, 0, 0, 0, 0.0, 0.0, False, error)


def print_json(row: Row) -> None:
    """Prints a row as one JSON object on one line of stdout."""
    print(json.dumps(asdict(row)), flush=True)


def print_verdict(rows: Sequence[Row], absent: Mapping[str, str], console: Console) -> None:
    """Prints the overall result and the command to run next."""
    for transport, reason in absent.items():
        console.print(f"not on this machine: {transport}: {escape(reason)}", highlight=False, soft_wrap=True)
    bad = [row.transport for row in rows if not row.good]
    if bad:
        console.print(
            f"[bold red]FAILED[/] over {', '.join(bad)}. Next: kvlink doctor", highlight=False, soft_wrap=True
        )
        return
    fastest = max(rows, key=lambda row: row.gib_per_s)
    console.print(
        f"[bold green]OK[/]: {sum(row.tokens for row in rows)} tokens, each as in the single-process run, over "
        f"{len(rows)} transport{'s' if len(rows) > 1 else ''}.\n"
        f"Next: kvlink bench pull --transport {fastest.transport}, or kvlink doctor for what would be faster here",
        highlight=False,
        soft_wrap=True,
    )


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
    for row in rows:
        if row.explanation:
            console.print(escape(row.explanation), highlight=False, soft_wrap=True)
    for row in rows:
        if row.error:
            console.print(
                f"[bold red]{row.transport} failed:[/] {escape(row.error)}", highlight=False, soft_wrap=True
            )
