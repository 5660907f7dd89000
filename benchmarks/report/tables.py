# SPDX-License-Identifier: Apache-2.0
"""Writes values and tables as HTML. All text from files is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_LONG_CHARS = 24  # from which on a cell is broken into lines

LIMIT = object()
"""The cell of a goal that is beyond what the machine itself can do, so that missing it is no fault."""


def table(caption: str, names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Returns a table. It scrolls sideways where the screen is narrow, also by keyboard."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(summary: str, parts: Iterable[str]) -> str:
    """Returns parts that a click or a key unfolds, or "" if there are none."""
    inside = "\n".join(part for part in parts if part)
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>" if inside else ""


def _cell(value: object) -> str:
    if isinstance(value, bool):
        said = "yes" if value else "no"
        return f'<td class="{said}">{said}</td>'
    if value is LIMIT:
        return '<td class="at-limit">limit</td>'
    if isinstance(value, float):
        return f"<td>{number_text(value)}</td>"
    if isinstance(value, int):
        return f"<td>{value:,}</td>"
    said = "" if value is None else escape(str(value))
    return f'<td class="long">{said}</td>' if len(said) > _LONG_CHARS else f"<td>{said}</td>"


def number_text(value: float) -> str:
    """Formats a number with three digits, or more before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def time_text(us: float, beside_us: float = 0.0) -> str:
    """Formats a time: "5.9 µs", "0.56 ms", "1.2 s". Its unit suits `beside_us` too, if that is longer."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if max(us, beside_us) >= 0.1 * size:
            return f"{_short(us / size)} {unit}"
    return f"{_short(us)} µs"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:#.2g}"
