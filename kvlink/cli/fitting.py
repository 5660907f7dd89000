# SPDX-License-Identifier: Apache-2.0
"""Fits tables to the terminal: where columns do not fit, the least important ones are omitted and named below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Column, Table

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
