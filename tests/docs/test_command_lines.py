# SPDX-License-Identifier: Apache-2.0
"""kvlink takes each of its command lines that a page shows in a block of code."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer.main
from deploy import commands

from kvlink.cli.examples import EXAMPLES
from kvlink.cli.plugins import GROUP

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^\s*(?:\$ )?(?:export )?(?:\w+=\S+ )*(?:\S+/)?kvlink (.*)$", re.MULTILINE)


def shown(path: Path) -> list[list[str]]:
    """The words behind `kvlink` of each line, without comments and what is left out."""
    lines = [
        line
        for fenced, indented in _BLOCK.findall(path.read_text())
        for line in _LINE.findall((fenced or indented).replace("\\\n", " "))
    ]
    return [shlex.split(re.split(r" [|>&]+ ", line)[0], comments=True) for line in lines]


def parsed(arguments: list[str]) -> object:
    """As `commands.parsed`, and the options of commands that other packages add."""
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    values = [
        "http://127.0.0.1:1" if one == "…" and before.startswith("--") else one
        for before, one in zip(["", *arguments], arguments, strict=False)
    ]
    words = [word for word in values if word != "…"]
    if words[0] not in others:
        return commands.parsed(words)
    command: Any = typer.main.get_command(others[words.pop(0)].load())
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    with command.make_context("kvlink", words) as context:
        return context.params


SHOWN = [
    pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)}")
    for path in PAGES
    for words in shown(path)
]


def test_there_are_some() -> None:
    assert len(SHOWN) > 20


@pytest.mark.parametrize("words", SHOWN)
def test_kvlink_takes_it(words: list[str]) -> None:
    parsed(words)


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_kvlink_takes_an_example_of_its_help(line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    assert program == "kvlink"
    parsed([word for word in words if word not in ("--wide", "--debug")])
