# SPDX-License-Identifier: Apache-2.0
"""Prints results on stdout: JSON lines for programs, tables for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column, Table

from kvlink.config import CATALOGUE, WorkerConfig
from kvlink.doctor import Check, Verdict

_GAP = 2
"""The space between two columns."""
_MOST = 40
"""The widest cell, in columns of the screen; longer cells are wrapped."""


def plain_table(*columns: str, title: str = "") -> Table:
    """Returns an empty table in the style of all commands."""
    table = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.collapse_padding = True
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


@dataclass(frozen=True, slots=True)
class Fitted:
    """Shows as many columns of a table as fit.

    `first` names its columns by importance. Columns that are not in it rank behind those, from left to right.
    """

    table: Table
    first: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        columns = self.table.columns
        widths = [
            max(len(str(column.header)), min(_natural(console, options, column), _MOST)) for column in columns
        ]
        ranked = sorted(range(len(columns)), key=self._rank)
        kept: list[int] = []
        for at in ranked:
            if sum(widths[each] + _GAP for each in kept) + widths[at] > options.max_width and kept:
                break
            kept.append(at)
        shown = plain_table(title=str(self.table.title or ""))
        shown.caption, shown.caption_justify = self.table.caption, "left"
        for at in sorted(kept):
            whole = _natural(console, options, columns[at]) <= widths[at]
            justify, header = columns[at].justify, columns[at].header
            shown.add_column(
                header, justify=justify, no_wrap=whole, overflow="fold", min_width=min(widths[at], _MOST)
            )
        for cells in zip(*(columns[at].cells for at in sorted(kept)), strict=True):
            shown.add_row(*cells)
        yield shown
        if len(kept) < len(columns):
            names = ", ".join(str(columns[at].header) for at in range(len(columns)) if at not in kept)
            yield f"[dim]not shown: {escape(names)} (--wide shows all)[/]"

    def _rank(self, at: int) -> tuple[int, int]:
        name = str(self.table.columns[at].header)
        return self.first.index(name) if name in self.first else len(self.first), at


def _natural(console: Console, options: ConsoleOptions, column: Column) -> int:
    """Returns the width of the column's widest cell."""
    wide = options.update(width=10_000)
    return max((Measurement.get(console, wide, cell).maximum for cell in column.cells), default=0)


# Columns by importance: what is measured, where, and the result. Other columns follow these.
_FIRST = (
    "worker", "state", "name", "what", "transport", "model", "layout", "at", "block_bytes", "tokens", "blocks", "agent",
    "value", "meaning", "source", "p50_us", "p99_us", "gib_per_s", "of_limit", "limit", "transports",
    "leases", "expired", "receives", "verified", "started", "ns_per_descriptor", "order",
)  # fmt: skip

_COLOURS = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


_WIDE = 400  # wide enough that no row is wrapped

_REDRAWS_PER_S = 4  # low, because the process may be measuring


class Shown:
    """Holds how tables are shown. The command line sets it once."""

    wide = False
    """True shows all columns, even if they do not fit."""


def make_console() -> Console:
    """Returns a console as wide as the terminal, else COLUMNS, else 80 columns."""
    return Console(highlight=False, width=_WIDE if Shown.wide else None)


def print_json(row: Mapping[str, Any]) -> None:
    """Prints one object on one line and flushes it."""
    print(json.dumps(row, default=str), flush=True)


def show_rows(
    rows: Iterable[Mapping[str, Any]], as_json: bool, title: str, by: str = ""
) -> list[Mapping[str, Any]]:
    """Shows rows like show_parts, when their number is not known."""
    return show_parts([rows], as_json, title, by)


def show_parts(
    parts: Sequence[Iterable[Mapping[str, Any]]],
    as_json: bool,
    title: str,
    by: str = "",
    first: Sequence[str] = (),
) -> list[Mapping[str, Any]]:
    """Prints rows as they come (JSON), or a table once all are there, and returns them.

    Progress goes to stderr, unless stderr shares a terminal with JSON on stdout. With several parts it is a bar. A part
    is computed only when it is iterated. `by` names a column: each of its values gets a table of its own. `first` names
    columns by importance; without it they are ranked as in other tables.
    """
    seen: list[Mapping[str, Any]] = []
    known = all(isinstance(part, Sequence) for part in parts)  # nothing is computed
    with _progress(bar=len(parts) > 1, quiet=known or (as_json and sys.stdout.isatty())) as progress:
        task = progress.add_task(title, total=len(parts))
        for part in parts:
            for row in part:
                seen.append(row)
                if as_json:
                    print_json(row)
                progress.update(task, description=f"{title}: {len(seen)} rows, {_summary(row)}")
            progress.advance(task)
    if as_json:
        return seen
    for value in dict.fromkeys(row.get(by) for row in seen):
        make_console().print(_table([row for row in seen if row.get(by) == value], value or title, first))
    return seen


def _progress(bar: bool, quiet: bool) -> Progress:
    """Shows the current step and its duration; the display disappears at the end."""
    columns: list[ProgressColumn] = [SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
    if bar:
        columns[1:1] = [BarColumn(), MofNCompleteColumn()]
    console = Console(stderr=True, quiet=quiet)
    return Progress(
        *columns,
        console=console,
        transient=True,
        refresh_per_second=_REDRAWS_PER_S,
        redirect_stdout=False,  # rows go to stdout, whatever this terminal shows
        disable=quiet or not console.is_interactive,
    )


def _summary(row: Mapping[str, Any]) -> str:
    return escape(" ".join(str(value) for value in row.values() if isinstance(value, str)))


def _table(rows: Sequence[Mapping[str, Any]], title: str, first: Sequence[str] = ()) -> Fitted:
    given = list(dict.fromkeys(name for row in rows for name in row))
    names = sorted(given, key=lambda name: first.index(name) if name in first else len(first))
    table = plain_table(title=title)
    for name in names:
        numeric = all(isinstance(row.get(name, 0), (int, float)) for row in rows)
        table.add_column(_head(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(name, row.get(name, "")) for name in names))
    return Fitted(table, [_head(name) for name in first or _FIRST])


def _head(name: str) -> str:
    words = name.replace("_us_95", "_us (95%)").replace("_per_", "/").replace("_", " ").split(" ")
    return " ".join(word.replace("gib", "GiB").replace("gb/", "GB/") for word in words)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and (name == "bytes" or name.endswith("_bytes")):
        return size_text(value)
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))


def show_checks(checks: Sequence[Check], as_json: bool) -> None:
    """Shows the results of the doctor's checks."""
    if as_json:
        for check in checks:
            print_json({**asdict(check), "verdict": check.verdict.value})
        return
    console = make_console()
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = f"[{_COLOURS[check.verdict]}]{check.verdict.value}[/]"
        console.print(f"{verdict}  {check.name:{width}}  {escape(check.evidence)}", soft_wrap=True)
        if check.fix:
            console.print(f"{'':{width + 6}}  [dim]fix:[/] {escape(check.fix)}", soft_wrap=True)
    counts = {verdict: sum(check.verdict is verdict for check in checks) for verdict in Verdict}
    console.print(", ".join(f"{number} {verdict.value}" for verdict, number in counts.items()))


def show_config(config: WorkerConfig, sources: Mapping[str, str], as_json: bool) -> None:
    """Shows every option with its value in force. Meanings name the unit."""
    rows = [
        {
            "name": setting.env,
            "value": getattr(config, setting.name),
            "default": setting.default,
            "source": sources[setting.name],
            "meaning": setting.meaning,
        }
        for setting in CATALOGUE
    ]
    text = [{name: str(value) for name, value in row.items()} for row in rows]
    show_rows(rows if as_json else text, as_json, "options")


_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"))


def bytes_text(number: float) -> str:
    """Formats a number of bytes with a binary unit: "1.50 GiB"."""
    unit = 0
    while number >= 1024 and unit < len(_BYTES) - 1:
        number, unit = number / 1024, unit + 1
    digits = 0 if number >= 100 or not number else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {_BYTES[unit]}"


def size_text(num_bytes: int) -> str:
    """Formats like `bytes_text`, but omits digits after the point that are zero: "16 KiB"."""
    for unit, name in enumerate(_BYTES):
        whole, rest = divmod(num_bytes, 1 << 10 * unit)
        if not rest and whole < 1024:
            return f"{whole} {name}"
    return bytes_text(num_bytes)


def seconds_text(seconds: float) -> str:
    """Formats a duration with the unit that fits: "4.2 ms". Returns a dash for 0, which means no value."""
    if not seconds:
        return "-"
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 1000:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s"


def age_text(seconds: float) -> str:
    """Formats an age: "42 s", "3.5 h", "12 d"."""
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds / length:.{1 if seconds < 10 * length else 0}f} {unit}"
    return f"{max(seconds, 0):.0f} s"
