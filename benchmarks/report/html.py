# SPDX-License-Identifier: Apache-2.0
"""Writes the report's HTML: one style sheet for any screen, light and dark; tables; bars that begin at zero.

Bars are tables for a screen reader. All text from files is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import cycle
from typing import NamedTuple

_LONG_CHARS = 24  # from which on a cell is broken into lines
_NUM_COLOURS = 8
_SHEET = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f4f6f8; --line: #d5dbe1; --ink: #1b1f24;
  --soft: #57606a; --link: #0b5cc4; --good: #1a7f37; --bad: #b3261e; --limit: #6b7280; --c0: #0b62d6; --c1: #b4532a;
  --c2: #00806e; --c3: #7a3db8; --c4: #c2255c; --c5: #9a6a00; --c6: #8c6d46; --c7: #6f6a00; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1317; --raised: #181d23; --line: #333c45; --ink: #e6ebf0;
  --soft: #a0abb6; --link: #7db8ff; --good: #5fd08b; --bad: #ff8a80; --limit: #9aa4af; --c0: #6cb0ff; --c1: #ef9464;
  --c2: #38c9b4; --c3: #c49bff; --c4: #ff85ac; --c5: #e3b54d; --c6: #cbab82; --c7: #c9c25a; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--ink);
  background: var(--ground); max-width: 60rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 2.6rem 0 .4rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; font-weight: 600; margin: 1.8rem 0 .5rem; }
p { margin: .4rem 0; } a { color: var(--link); } .warn { color: var(--bad); font-weight: 600; }
.soft, caption { color: var(--soft); font-size: .875rem; } caption { text-align: left; padding-bottom: .3rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; margin: 1rem 0 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; margin: .6rem 0; font-size: .875rem; }
.scroll th, .scroll td { padding: .25rem .9rem .25rem 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
.scroll th:first-child, .scroll td:first-child { text-align: left; }
.scroll td.long { white-space: normal; text-align: left; overflow-wrap: anywhere; min-width: 14rem; }
.bars { width: 100%; table-layout: fixed; }
.bars th { width: 24%; text-align: right; font-weight: 400; padding: .15rem .7rem .15rem 0; line-height: 1.25; }
.bars td { padding: .15rem 0; } .bars td:last-child { width: 22%; padding-left: .7rem; line-height: 1.25; }
.bars small { color: var(--soft); font-weight: 400; } .bars .ours th, .bars .ours td { font-weight: 600; }
.track { position: relative; } .bar { display: flex; height: 1.15rem; min-width: 2px; }
.bar i, .key i { display: block; background: var(--c1); } .ours .bar i { background: var(--c0); }
.limit .bar i { background: var(--limit); }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .875rem; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
.mark { position: absolute; top: 0; bottom: 0; width: 2px; margin-left: -1px; background: var(--ink); }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
details { margin: .6rem 0; } summary { cursor: pointer; color: var(--link); padding: .15rem 0; }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.yes { color: var(--good); } .no { color: var(--bad); font-weight: 600; }
@media (max-width: 34rem) { body { padding-top: 1.2rem; } .bars th { width: 32%; } .bars { font-size: .9rem; }
  .bars td:last-child { width: 32%; } }
@media print { details > * { display: block; } nav { display: none; } }
"""


class Bar(NamedTuple):
    """One bar of parts that follow each other. `kind` is "ours", "limit" or "". `mark` is drawn as a line."""

    name: str
    parts: Sequence[float]
    value: str
    kind: str = ""
    mode: str = ""
    note: str = ""
    mark: float | None = None


def bars(caption: str, rows: Sequence[Bar], keys: Sequence[str] = ()) -> str:
    """Returns bars to one scale, which no mark leaves. `keys` names the parts, if bars have several."""
    most = max((end for row in rows for end in (sum(row.parts), row.mark or 0.0)), default=0.0) or 1.0
    head = (
        '<thead class="unseen"><tr><th scope="col">what</th><td></td><th scope="col">value</th></tr></thead>'
    )
    legend = "".join(
        f'<span><i style="background:var(--c{number % _NUM_COLOURS})"></i>{escape(key)}</span>'
        for number, key in enumerate(keys)
    )
    return (
        (f'<p class="key">{legend}</p>' if keys else "")
        + f'<table class="bars"><caption class="unseen">{escape(caption)}</caption>{head}<tbody>'
        + "".join(_bar(row, most, bool(keys)) for row in rows)
        + "</tbody></table>"
    )


def _bar(row: Bar, most: float, several: bool) -> str:
    colours = cycle(range(_NUM_COLOURS)) if several else ()
    fills = (f";background:var(--c{each})" for each in colours) if several else cycle([""])
    parts = "".join(
        f'<i style="width:{part / most:.2%}{fill}"></i>' for part, fill in zip(row.parts, fills, strict=False)
    )
    line = "" if row.mark is None else f'<span class="mark" style="left:{row.mark / most:.1%}"></span>'
    mode = f"<br><small>{escape(row.mode)}</small>" if row.mode else ""
    note = f"<br><small>{escape(row.note)}</small>" if row.note else ""
    return (
        f'<tr class="{row.kind}"><th scope="row">{escape(row.name)}{mode}</th><td class="track">'
        f'<span class="bar">{parts}</span>{line}</td><td>{escape(row.value)}{note}</td></tr>'
    )


def table(caption: str, rows: Iterable[dict[str, object]]) -> str:
    """Returns a table of rows, or "" without any. It scrolls sideways on a narrow screen, also by keyboard."""
    listed = list(rows)
    names = list(dict.fromkeys(name for row in listed for name in row))
    head = "".join(f'<th scope="col">{escape(name.replace("_", " "))}</th>' for name in names)
    body = "".join(f"<tr>{''.join(_cell(row.get(name)) for name in names)}</tr>" for row in listed)
    return (listed and (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )) or ""  # fmt: skip


def _cell(value: object) -> str:
    if isinstance(value, bool):
        said = "yes" if value else "no"
        return f'<td class="{said}">{said}</td>'
    if isinstance(value, float):
        return f"<td>{number_text(value)}</td>"
    said = f"{value:,}" if isinstance(value, int) else "" if value is None else escape(str(value))
    return f'<td class="long">{said}</td>' if len(said) > _LONG_CHARS else f"<td>{said}</td>"


def folded(summary: str, inside: str) -> str:
    """Returns a part that a click or a key unfolds, or "" if it is empty."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>" if inside else ""


def document(title: str, body: Iterable[str]) -> str:
    """Returns the whole page."""
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_SHEET}</style></head><body>\n"
    )
    return "\n".join([head, *body, "</body></html>\n"])


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


def size_text(num_bytes: int) -> str:
    """Formats a size: "16 KiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size and num_bytes % size == 0:
            return f"{num_bytes // size:,} {unit}"
    return f"{num_bytes:,} B"
