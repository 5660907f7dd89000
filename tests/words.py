# SPDX-License-Identifier: Apache-2.0
"""Checks the language of pages, docstrings, comments and help texts. Runs with `make lint`.

python tests/words.py              checks all Markdown, and what the lists below have
python tests/words.py kvlink csrc  checks docstrings, help texts and comments of these folders too

A word in code (fenced, or in backticks) is a name and is not checked.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_CHECKED = ("benchmarks", "csrc", "docs", "integrations", "kvlink", "tests")
"""Folders whose docstrings, help texts and comments are checked."""
_EXAMPLES = ("tests/docs/test_words.py",)
"""Files that have these words as examples."""

INSTEAD = {
    r"len(?:d|ds|t|ding)": "export, register, share",
    r"(?:lend|borrow)ers?": "owner, reader; fd server, fd client",
    r"anew": "again",
    r"befalls?|befell": "happens to",
    r"hand-?overs?|hand-offs?": "handoff",
    r"as ever": "as before, or nothing",
    r"g[ia]ve[sn]? (?:\w+ ){0,3}back|giving (?:\w+ ){0,3}back": "release, return, free",
    r"hear[sd]?|hearing": "receive, learn of",
    r"(?:stand|stands|stood|standing) still": "is stopped, is paused",
    r"look(?:s|ed|ing)? at": "read, check, inspect",
}
_WORDS = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), better) for pattern, better in INSTEAD.items()]
_OPENING = re.compile(r"(Of|What|Who|Whom|Whose)\b")
_HELP_OPENING = re.compile(r"(Of|What|Who|Whom|Whose|That|Instead)\b")
_CPP_COMMENT = re.compile(r"\s*///? (.*)")
_CPP_TEXT = re.compile(r'"((?:\\.|[^"\\])*)"')
_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``.*?``|`[^`\n]*`|\]\([^)\s]*\)|<[^>\n]*>")

Found = tuple[int, str]
"""A line and what is wrong with it."""


def _blank(found: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", found[0])


def in_prose(text: str, first_line: int = 1) -> Iterator[Found]:
    """The words of a text that has other names here, code left out."""
    for number, line in enumerate(_CODE.sub(_blank, text).splitlines(), first_line):
        for word, better in _WORDS:
            for found in word.finditer(line):
                yield number, f"{found[0]!r}: write {better}"


def in_markdown(text: str) -> Iterator[Found]:
    """As `in_prose`, for a page."""
    return in_prose(_FENCE.sub(_blank, text))


def in_docstrings(source: str) -> Iterator[Found]:
    """Words of docstrings, those behind attributes included, and docstrings that begin without a sentence."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        text = node.value.value
        if not isinstance(text, str):
            continue
        if opening := _OPENING.match(text):
            yield node.lineno, f"a docstring begins with {opening[0]!r}: write a sentence"
        yield from in_prose(text, node.lineno)


def in_help(source: str) -> Iterator[Found]:
    """The same for help texts of options: `help="..."` in a call."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            text = str(node.value.value)
            if opening := _HELP_OPENING.match(text):
                yield node.value.lineno, f"a help text begins with {opening[0]!r}: name what the option sets"
            yield from in_prose(text, node.value.lineno)


def in_comments(source: str, is_python: bool) -> Iterator[Found]:
    """Words of comments."""
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?:^|\s)#\s(.*)" if is_python else r"//+(.*)", line)
        if comment:
            yield from in_prose(comment[1], number)


def in_cpp(source: str) -> Iterator[Found]:
    """Words of comments and texts, and comments on lines of their own that begin without a sentence."""
    yield from in_comments(source, is_python=False)
    before = None
    for number, line in enumerate(source.splitlines(), 1):
        comment = _CPP_COMMENT.match(line)
        if comment and not before and (opening := _OPENING.match(comment[1])):
            yield number, f"a comment begins with {opening[0]!r}: write a sentence"
        before = comment
        if not line.startswith("#include"):
            for text in _CPP_TEXT.findall(line.partition("  // ")[0]):
                yield from in_prose(text, number)


def _tracked(*patterns: str) -> list[str]:
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    return subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


def _is_in(name: str, folders: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{folder}/" for folder in folders))


def check(more: Sequence[str] = ()) -> list[str]:
    """Returns a line for each finding."""
    wrong = []
    for name in _tracked("*.md", "*.py", "*.h", "*.cc"):
        path = ROOT / name
        if not path.is_file() or name in _EXAMPLES:
            continue
        found: list[Found] = []
        if path.suffix == ".md":
            found += in_markdown(path.read_text())
        elif path.suffix == ".py" and _is_in(name, (*_CHECKED, *more)):
            found += [*in_docstrings(path.read_text()), *in_help(path.read_text())]
        if path.suffix == ".py" and _is_in(name, (*_CHECKED, *more)):
            found += in_comments(path.read_text(), is_python=True)
        elif path.suffix in (".h", ".cc") and _is_in(name, (*_CHECKED, *more)):
            found += in_cpp(path.read_text())
        wrong += [f"{name}:{line}: {what}" for line, what in sorted(found)]
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Prints the findings; 1 if there are any."""
    wrong = check(arguments)
    print("\n".join(wrong), end="\n" if wrong else "")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
