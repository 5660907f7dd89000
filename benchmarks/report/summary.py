# SPDX-License-Identifier: Apache-2.0
"""Draws a chart of bars, such as the README's, from a summary of measurements, for light and dark pages and phones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from kvlink.errors import ConfigError

KINDS = ("ours", "other", "limit")
_STYLE = """<style>
  .ground { fill: #ffffff } text { fill: #1f2328 } .faint { fill: #59636e } .mark { stroke: #1f2328 }
  .ours { fill: #0b62d6 } .other { fill: #b4532a } .limit { fill: #8a8f98 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } text { fill: #e6edf3 } .faint { fill: #9198a1 } .mark { stroke: #e6edf3 }
    .ours { fill: #58a6ff } .other { fill: #e0834f } .limit { fill: #6e7681 }
  }
</style>"""
WIDTH, EDGE, ROW, LABEL, BAR = 560, 10, 24, 190, 290
_LETTERS, _SMALL_LETTERS = 62, 92
"""How many letters fit into a line of the title, and of what was measured."""


def _text(x: float, y: float, size: int, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{more}>{escape(text)}</text>'


def _panel(panel: dict[str, Any], y: float) -> Iterator[str]:
    yield _text(EDGE, y, 13, panel["title"], ' font-weight="600"')
    mark = panel.get("mark", 0)
    top, longest = y, max(mark, *(value for _, value, _ in panel["bars"]))
    for name, value, kind in panel["bars"]:
        y += ROW
        width = max(BAR * value / longest, 2)
        yield _text(LABEL - 8, y, 13, name, ' text-anchor="end"')
        yield (
            f'<rect x="{LABEL}" y="{y - 13:g}" width="{width:.1f}" height="17" rx="2" '
            f'class="{KINDS[KINDS.index(kind)]}"/>'
        )
        yield _text(LABEL + (BAR if mark else round(width, 1)) + 8, y, 13, f"{value:,g}")
    if mark:
        x = LABEL + BAR * mark / longest
        yield f'<path class="mark" stroke-dasharray="4 3" d="M{x:.1f} {top + 8:g}V{y + 6:g}"/>'


def drawn(data: dict[str, Any]) -> str:
    """Returns the SVG. Its colours follow the reader's choice of light or dark."""
    lines, y = [], 4.0
    for line in wrap(data["title"], _LETTERS):
        y += 20
        lines.append(_text(EDGE, y, 14, line, ' font-weight="600"'))
    for panel in data["panels"]:
        lines += _panel(panel, y + 32)
        y += 32 + ROW * len(panel["bars"])
    y += 12
    for line in wrap(data["run"], _SMALL_LETTERS):
        y += 17
        lines.append(_text(EDGE, y, 11, line, ' class="faint"'))
    what = "; ".join(
        f"{panel['title']}: " + ", ".join(f"{name} {value:,g}" for name, value, _ in panel["bars"])
        for panel in data["panels"]
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 14:g}" '
            f'viewBox="0 0 {WIDTH} {y + 14:g}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(data['title'])}. {escape(what)}</title>",
            _STYLE,
            '<rect class="ground" width="100%" height="100%" rx="8"/>',
            *lines,
            "</svg>\n",
        )
    )


def write_charts(summary: Path, folder: Path) -> Path:
    """Writes NAME.svg, with the name of the summary, and returns its path. Raises ConfigError.

    The summary is a JSON object: `title` says what the bars are and in which unit, `run` says on what, where and
    when, and each of `panels` has a `title`, `bars` of [name, number, "ours", "other" or "limit"],
    and perhaps a `mark`, a number at which a line is drawn.
    """
    try:
        text = drawn(json.loads(summary.read_text()))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{summary} is no summary of measurements: {error!r}") from error
    written = folder / f"{summary.stem}.svg"
    written.write_text(text)
    return written
