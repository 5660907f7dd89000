# SPDX-License-Identifier: Apache-2.0
"""Draws a chart of a few bars, such as the README's, from a summary of measurements, for light and dark pages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from kvlink.errors import ConfigError

_KINDS = ("ours", "other", "limit", "text", "faint")
COLOURS = {
    "light": dict(zip(_KINDS, ("#0b62d6", "#b4532a", "#8a8f98", "#1f2328", "#59636e"), strict=True)),
    "dark": dict(zip(_KINDS, ("#58a6ff", "#e0834f", "#6e7681", "#e6edf3", "#9198a1"), strict=True)),
}
_TITLE = "Time to move 256 scattered blocks (ms, less is better)"
WIDTH, ROW, LABEL, BAR = 720, 24, 130, 500


def _text(x: float, y: float, size: int, colour: str, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(text)}</text>'


def _lines(data: dict[str, Any], colours: dict[str, str]) -> Iterator[str]:
    y = 22.0
    yield _text(0, y, 15, colours["text"], _TITLE, ' font-weight="600"')
    for panel in data["panels"]:
        y += 32
        yield _text(0, y, 13, colours["text"], panel["title"])
        longest = max(value for _, value, _ in panel["bars"])
        for name, value, kind in panel["bars"]:
            y += ROW
            width = BAR * value / longest
            yield _text(LABEL - 8, y, 13, colours["text"], name, ' text-anchor="end"')
            yield f'<rect x="{LABEL}" y="{y - 13:g}" width="{width:.1f}" height="17" rx="2" fill="{colours[kind]}"/>'
            yield _text(LABEL + round(width, 1) + 8, y, 13, colours["text"], f"{value:g}")
    yield _text(0, y + 30, 11, colours["faint"], data["run"])


def drawn(data: dict[str, Any], colours: dict[str, str]) -> str:
    """Returns one SVG."""
    rows = sum(len(panel["bars"]) for panel in data["panels"])
    height = 22 + 32 * len(data["panels"]) + ROW * rows + 40
    what = "; ".join(
        f"{panel['title']}: " + ", ".join(f"{name} {value:g} ms" for name, value, _ in panel["bars"])
        for panel in data["panels"]
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    )
    return "\n".join((head, f"<title>{escape(what)}</title>", *_lines(data, colours), "</svg>\n"))


def write_charts(summary: Path, folder: Path) -> list[Path]:
    """Writes NAME-light.svg and NAME-dark.svg, with the name of the summary. Raises ConfigError.

    The summary is a JSON object: `run` says on what, where and when, and each of `panels` has a `title` and `bars` of
    [name, milliseconds, "ours", "other" or "limit"].
    """
    try:
        data = json.loads(summary.read_text())
        texts = {theme: drawn(data, colours) for theme, colours in COLOURS.items()}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{summary} is no summary of measurements: {error!r}") from error
    paths = {theme: folder / f"{summary.stem}-{theme}.svg" for theme in texts}
    for theme, path in paths.items():
        path.write_text(texts[theme])
    return list(paths.values())
