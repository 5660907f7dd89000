# SPDX-License-Identifier: Apache-2.0
"""The directive `kvlink-native`: what kvlink.h says of its functions, structures and codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

HEADER = Path(__file__).resolve().parents[2] / "csrc" / "capi" / "kvlink.h"
_DECLARED = re.compile(
    r"(?:/\* (?P<said>(?:(?!\*/).)*?) \*/\n)?"
    r"(?P<code>^KVL_API [^;]*;|^typedef (?:struct|enum) \w+ \{.*?^\} (?P<type>\w+);|^enum \{[^}]*\};)",
    re.MULTILINE | re.DOTALL,
)
_KINDS = ("Functions", "Structures and codes")


def sections() -> Iterator[str]:
    """The lines of a section for the functions, and one for the types."""
    text = HEADER.read_text()
    whole, *_ = re.findall(r"/\* (.*?) \*/", text, re.DOTALL)
    yield from _paragraphs(whole)
    found = list(_DECLARED.finditer(text))
    for kind, is_function in zip(_KINDS, (True, False), strict=True):
        yield from (f"## {kind}", "")
        for one in found:
            if one["code"].startswith("KVL_API") is is_function:
                yield from _declaration(one, is_function)


def _declaration(one: re.Match[str], is_function: bool) -> Iterator[str]:
    code = one["code"].removeprefix("KVL_API ")
    name = re.search(r"kvl_\w+(?=\()", code) if is_function else None
    if name is not None or one["type"]:
        yield from (f"### `{name[0] if name else one['type']}`", "")
    yield from _paragraphs(one["said"] or "")
    yield from ("```c", *code.splitlines(), "```", "")


def _paragraphs(comment: str) -> Iterator[str]:
    """The text of a comment, without what marks its lines."""
    text = re.sub(r"\n \*", "\n", comment).replace("*", r"\*")
    for paragraph in filter(None, re.split(r"\n\s*\n", text)):
        yield from (" ".join(paragraph.split()), "")


class _Native(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.note_dependency(str(HEADER))
        holder = nodes.Element()
        self.state.nested_parse([*sections()], self.content_offset, holder, match_titles=True)
        return list(holder.children)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("kvlink-native", _Native)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
