# SPDX-License-Identifier: Apache-2.0
"""Draws which rooms of the code import which: `python docs/_ext/house.py` writes docs/design/house.svg.

The rows of Python are those of the import contracts in pyproject.toml; the rows of C++ follow from its includes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "design" / "house.svg"
_CONTRACTS = {"kvlink": "imports go down only", "integrations/vllm": "the rooms of the connector for vLLM"}
_PACKAGES = {"kvlink": "kvlink", "integrations/vllm": "kvlink.integrations.vllm"}
_WIDTH, _LEFT, _LABEL, _CELL = 720, 16, 130, 24

Arrows = set[tuple[str, str]]


def contract_rows(folder: str) -> list[list[str]]:
    """Returns the rooms of a Python folder by row, the top row first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["name"] == _CONTRACTS[folder])
    rows = [[name.strip().removeprefix("kvlink.") for name in re.split("[|:]", layer)] for layer in layers]
    return [row for row in rows if row != ["__main__"]]


def python_arrows(folder: str, rooms: Iterable[str]) -> Arrows:
    """Returns the pairs of rooms of which the first imports the second."""
    package, graph = _PACKAGES[folder], grimp.build_graph("kvlink", cache_dir=None)
    room_of = {
        module: room
        for room in rooms
        for module in graph.modules
        if f"{module}.".startswith(f"{package}.{room}.")
    }
    return {
        (room, room_of[imported])
        for module, room in room_of.items()
        for imported in graph.find_modules_directly_imported_by(module)
        if imported in room_of and room_of[imported] != room
    }


def csrc_arrows() -> Arrows:
    """Returns the pairs of folders of csrc of which the first includes the second."""
    arrows = set()
    for file in (ROOT / "csrc").rglob("*.[hc]*"):
        room = file.relative_to(ROOT / "csrc").parts[0]
        for header in re.findall(r'^#include "([^"/]+)/', file.read_text(), re.MULTILINE):
            if header != room:
                arrows.add((room, header))
    return arrows


def rows_of(arrows: Arrows) -> list[list[str]]:
    """Returns rooms by row such that every arrow goes down. Raises ValueError for a circle."""
    rooms = {room for arrow in arrows for room in arrow}
    rows: list[list[str]] = []
    while rooms:
        row = sorted(
            room for room in rooms if not any(one in rooms for one, other in arrows if other == room)
        )
        if not row:
            raise ValueError(f"a circle among {sorted(rooms)}")
        rows.append(row)
        rooms -= set(row)
    return rows


def upward(rows: Sequence[Sequence[str]], arrows: Arrows) -> Arrows:
    """Returns the arrows that do not go down."""
    row_of = {room: number for number, row in enumerate(rows) for room in row}
    return {(one, other) for one, other in arrows if row_of[one] >= row_of[other]}


def panels() -> dict[str, tuple[list[list[str]], Arrows]]:
    """Returns the rows and the arrows of each part of the picture."""
    found = {}
    for folder in _CONTRACTS:
        rows = contract_rows(folder)
        found[folder] = (rows, python_arrows(folder, [room for row in rows for room in row]))
    arrows = csrc_arrows()
    found["csrc"] = (rows_of(arrows), arrows)
    return found


def _panel(title: str, rows: Sequence[Sequence[str]], arrows: Arrows, top: int) -> list[str]:
    """Returns a matrix: a dot where the room of the line imports the room of the column."""
    rooms = [room for row in rows for room in row]
    about = f"{title}: {len(rooms)} rooms in {len(rows)} rows, {len(arrows)} arrows"
    lines = [f'<text x="{_LEFT}" y="{top + 16}" class="title">{about}</text>']
    x0, y0 = _LEFT + _LABEL, top + _LABEL
    for number, room in enumerate(rooms):
        x, y = x0 + number * _CELL, y0 + number * _CELL
        lines.append(f'<text x="{x0 - 8}" y="{y + 16}" class="room">{room}</text>')
        lines.append(f'<text transform="translate({x + 15} {y0 - 8}) rotate(-45)">{room}</text>')
        lines.append(f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" class="own"/>')
        lines.append(f'<path d="M{x0} {y}H{x0 + _CELL * len(rooms)}M{x} {y0}V{y0 + _CELL * len(rooms)}"/>')
    for one, other in sorted(arrows):
        x, y = (round((rooms.index(room) + 0.5) * _CELL) for room in (other, one))
        lines.append(
            f'<circle cx="{x0 + x}" cy="{y0 + y}" r="5"><title>{one} imports {other}</title></circle>'
        )
    return lines


def picture() -> str:
    """Returns the drawing as SVG."""
    lines, top = [], 0
    for title, (rows, arrows) in panels().items():
        lines += _panel(title, rows, arrows, top)
        top += _LABEL + 40 + _CELL * sum(map(len, rows))
    style = (
        "svg{background:#fff}rect{fill:none}.own{fill:#c9d6ec}path{fill:none;stroke:#dde3ec}circle{fill:#27487f}"
        "text{font:13px sans-serif;fill:#1c2733}.room{text-anchor:end}.title{font-weight:bold}"
        "@media (prefers-color-scheme:dark){svg{background:#0d1117}.own{fill:#22395c}path{stroke:#262d37}"
        "circle{fill:#79aef5}text{fill:#e6edf3}}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}">'
    title = "<title>Which room of kvlink, of its connector for vLLM and of csrc imports which</title>"
    return "\n".join([head, title, f"<style>{style}</style>", *lines, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
