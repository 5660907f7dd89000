# SPDX-License-Identifier: Apache-2.0
"""A function has at most 60 lines of body, without its signature and its docstring. Tests count too."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 60
EXEMPT = re.compile(r"csrc/.* (register_\w+|PYBIND11_MODULE)$")
"""Functions that list what the bindings offer: they are as long as their lists."""

_NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*"
    r'|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'',
    re.DOTALL | re.MULTILINE,
)
_SCOPE = re.compile(r"(?:^|[\s:>])(?:namespace|class|struct|union|enum|extern)\b[^()]*$")
_NAME = re.compile(r"([\w:~]+|operator\W+)\s*\(")
_MEMBER = re.compile(r"\)\s*(?:noexcept\s*)?:(?!:).*[\w>]\s*$", re.DOTALL)

Function = tuple[str, int]
"""Its name and its lines of body."""


def in_python(text: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            above = (
                node.body[0].end_lineno if ast.get_docstring(node) is not None else node.body[0].lineno - 1
            )
            yield node.name, node.end_lineno - above


def in_cpp(text: str) -> Iterator[Function]:
    code = _NOT_CODE.sub(lambda found: "\n" * found[0].count("\n"), text)
    depth, began, head = 0, 0, 0
    for mark in re.finditer(r"[{};]", code):
        if not depth:
            if mark[0] == "{" and not _SCOPE.search(code[head : mark.start()]):
                depth, began = 1, mark.start()
            else:
                head = mark.end()
        elif mark[0] != ";":
            depth += 1 if mark[0] == "{" else -1
            before = code[head:began]
            name = None if depth or _is_value(before) else _NAME.search(before)
            if name is not None:
                yield name[1], max(1, code.count("\n", began, mark.start()) - 1)
                head = mark.end()


def _is_value(before: str) -> bool:
    """Whether the brace behind this text begins a default argument or a member in a constructor's list."""
    return before.count("(") != before.count(")") or _MEMBER.search(before) is not None


CPP = """
class Hall {
  Hall(int a, int b = {}) : a_{a}, b_{b} {
    fill();  // }
  }
};
int sum(std::vector<int> of = {}) noexcept {
  if (of.empty()) {
    return '{';
  }
}
int one() { return 1; }
"""


def test_bodies_are_counted() -> None:
    assert list(in_cpp(CPP)) == [("Hall", 1), ("sum", 3), ("one", 1)]
    assert list(in_python('def sum(a,\n  b):\n  """Adds."""\n\n  # now\n  return a + b\n')) == [("sum", 3)]


@pytest.mark.parametrize(("endings", "functions"), [(["*.py"], in_python), (["*.cc", "*.h", "*.c"], in_cpp)])
def test_no_function_is_too_long(endings, functions) -> None:
    listed = subprocess.check_output(["git", "ls-files", *endings], cwd=ROOT, text=True).split()
    found = [
        (f"{path} {name}", lines) for path in listed for name, lines in functions((ROOT / path).read_text())
    ]
    assert len(found) > 1000
    assert not [each for each in found if each[1] > MOST and not EXEMPT.match(each[0])]
