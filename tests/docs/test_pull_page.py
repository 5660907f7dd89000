# SPDX-License-Identifier: Apache-2.0
"""The pages about a pull have the states, edges and actions of the code, and what found each edge that was removed."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/design/pull.md").read_text()
TABLES = (ROOT / "docs/design/simulation.md").read_text()
HEADER = (ROOT / "csrc/engine/pull.h").read_text()


def load_edges() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulation_edges", ROOT / "tests/simulation/edges.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


edges = load_edges()
CHANGES = [*edges.CHANGES, *edges.PLANTED]


def enumerators(enum: str) -> list[str]:
    found = re.search(rf"enum class {enum} : uint8_t \{{(.*?)\n *\}};", HEADER, re.DOTALL)
    assert found is not None
    return re.findall(r"^ *k(\w+)", found[1], re.MULTILINE)


def rows(page: str, title: str) -> list[list[str]]:
    """The cells of a table that begins with these columns, without its heading."""
    lines = page[page.index(title) :].splitlines()[2:]
    table = lines[: next((at for at, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_page_has_each_state() -> None:
    states = enumerators("PullState")
    drawn = set(re.findall(r"\b[A-Z]\w+", PAGE.split("```")[1]))
    assert drawn == set(states)
    named = {state for source, target, _ in rows(PAGE, "| from | to | by |") for state in (source, target)}
    assert named == {*states, "new"}


def test_the_page_has_each_edge() -> None:
    assert [tuple(row) for row in rows(PAGE, "| from | to | by |")] == list(edges.EDGES.values())


def test_the_page_has_each_action() -> None:
    actions = [f"k{action}" for action in enumerators("Kind")]
    assert [row[0] for row in rows(PAGE, "| action |")] == actions


def test_each_edge_is_taken_away() -> None:
    assert {change.edge for change in edges.CHANGES} == set(edges.EDGES)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.edge}-{change.what}")
def test_each_change_applies_to_todays_code(change: object) -> None:
    assert edges.changed_text(change) != (ROOT / change.file).read_text()  # type: ignore[attr-defined]


def test_the_result_of_each_change_is_told() -> None:
    told = [row[:2] for row in rows(TABLES, "| edge | change |")]
    assert told == [rows(f"\n\n{edges.row(change, ('', ''))}", "")[0][:2] for change in CHANGES]
