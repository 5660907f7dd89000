# SPDX-License-Identifier: Apache-2.0
"""Draws the README's chart from peers.json: python docs/benchmarks/chart.py"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STATIC = HERE.parent / "_static"
COLOURS = {
    "light": {
        "ours": "#0b62d6",
        "other": "#b4532a",
        "limit": "#8a8f98",
        "text": "#1f2328",
        "faint": "#59636e",
    },
    "dark": {
        "ours": "#58a6ff",
        "other": "#e0834f",
        "limit": "#6e7681",
        "text": "#e6edf3",
        "faint": "#9198a1",
    },
}
WIDTH, ROW, LABEL, BAR = 720, 24, 130, 500


def _text(x: float, y: float, size: int, colour: str, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}"{more}>{escape(text)}</text>'


def _lines(data: dict[str, Any], colours: dict[str, str]) -> Iterator[str]:
    y = 22.0
    yield _text(
        0,
        y,
        15,
        colours["text"],
        "Time to move 256 scattered blocks (ms, less is better)",
        ' font-weight="600"',
    )
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
    """One SVG."""
    rows = sum(len(panel["bars"]) for panel in data["panels"])
    height = 22 + 32 * len(data["panels"]) + ROW * rows + 40
    what = "; ".join(
        f"{panel['title']}: " + ", ".join(f"{name} {value:g} ms" for name, value, _ in panel["bars"])
        for panel in data["panels"]
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
            f"<title>{escape(what)}</title>",
            *_lines(data, colours),
            "</svg>\n",
        )
    )


def charts() -> dict[str, str]:
    """By file name."""
    data = json.loads((HERE / "peers.json").read_text())
    return {f"peers-{theme}.svg": drawn(data, colours) for theme, colours in COLOURS.items()}


if __name__ == "__main__":
    for name, text in charts().items():
        (STATIC / name).write_text(text)
