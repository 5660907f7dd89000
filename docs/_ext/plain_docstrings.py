# SPDX-License-Identifier: Apache-2.0
"""Renders kvlink's docstrings, which are plain text: `name: meaning` lines, and code in single backticks."""

from __future__ import annotations

import re
from typing import Any

_ARGUMENT = re.compile(r"([a-z_][\w]*(?:, [a-z_]\w*)*): +(\S.*)")
_CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?![`_])")


def as_rst(lines: list[str]) -> list[str]:
    """Turns `name: meaning` lines into a list, and single backticks into double ones."""
    out: list[str] = []
    in_list = False
    for line in lines:
        found = _ARGUMENT.match(line)
        if found and (in_list or not out or not out[-1].strip()):
            line, in_list = f"* ``{found[1]}``: {found[2]}", True
        elif in_list and line.startswith("    "):
            line = "  " + line.strip()
        elif in_list and line.strip():
            out, in_list = [*out, ""], False
        out.append(_CODE.sub(r"``\1``", line))
    return out


def _process(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    lines[:] = as_rst(lines)


def _names_of_types(app: Any, what: str, name: str, obj: object, options: Any, *both: str | None) -> Any:
    """Shows an alias within a union by its name, as `autodoc_type_aliases` does outside of unions."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in both)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    app.connect("autodoc-process-signature", _names_of_types)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
