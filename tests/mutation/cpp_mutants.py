# SPDX-License-Identifier: Apache-2.0
"""Mutants of C++ files: all that were chosen are compiled into one build, and KVLINK_MUTANT switches one on.

Works on tokens, and relies on what clang-format does: a binary operator has a space on either side, a template's
bracket and a pointer's star have not. What comes out wrong does not compile, and is dropped.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mutation.mutants import Mutant, numbered, shortened

_TOKENS = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/)|(?P<directive>#(?:\\\n|[^\n])*)|"
    r'(?P<text>R"\((?:.*?)\)"|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])+\')|(?P<number>\d[\w.\']*)|(?P<word>[A-Za-z_]\w*)|'
    r"(?P<sign><<=|>>=|<=>|\.\.\.|->|::|\+\+|--|<<|>>|[<>=!+\-*/%&|^]=|&&|\|\||.)",
    re.DOTALL,
)
_PRECEDENCE = {
    **dict.fromkeys("*/%", 10), **dict.fromkeys("+-", 9), **dict.fromkeys(("<<", ">>"), 8),
    **dict.fromkeys(("<", ">", "<=", ">="), 6), **dict.fromkeys(("==", "!="), 5),
    "&": 4, "^": 3, "|": 2, "&&": 1, "||": 0,
}  # fmt: skip
_OTHER = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "/", "/": "*",
    "%": "/", "&": "|", "|": "&", "^": "|", "<<": ">>", ">>": "<<", "&&": "||", "||": "&&",
    "+=": "-=", "-=": "+=", "|=": "&=", "&=": "|=", "++": "--", "--": "++", "true": "false", "false": "true",
}  # fmt: skip
_KEYWORDS = re.compile(
    "alignas|auto|bool|break|case|catch|char|const|constexpr|continue|default|delete|do|double|else|enum|explicit|for|"
    "friend|goto|if|int|new|operator|return|short|signed|sizeof|static|static_assert|struct|switch|template|throw|try|"
    "typedef|typename|unsigned|using|void|while|static_cast|reinterpret_cast|const_cast|decltype|assert"
)
_OPAQUE = frozenset(
    ("constexpr", "static_assert", "using", "typedef", "case", "assert", "KVLINK_CHECK", "KVLINK_DCHECK")
)
_TYPES = frozenset(("namespace", "class", "struct", "union", "enum", "extern"))
_ENDS = frozenset(
    ("(", "[", "{", ")", "]", "}", ",", ";", "?", ":", "return", "=", "+=", "-=", "|=", "&=", "<<=", "*=")
)
_UNORDERED = frozenset(("min", "max", "__builtin_mul_overflow", "__builtin_add_overflow"))
_LOCKS = re.compile(r"std :: (lock_guard|unique_lock|scoped_lock|shared_lock) \w+ \( [\w.\->]+ \) ;")

_DECLARATION = re.compile(r"[\w:]+(?:<.*>)?(?:::\w+)*[&*]* (?:const )?[&*]*\w+ ?[=({;\[,]")


class Token(NamedTuple):
    """A token and where it is in the file."""

    kind: str
    text: str
    start: int
    end: int


class Site(NamedTuple):
    """A mutant, and the text that it replaces. `form` is expression, statement or lock."""

    mutant: Mutant
    start: int
    end: int
    form: str
    alternative: str


def _tokens(source: str) -> list[Token]:
    """The tokens, without what stands behind an #else."""
    found, other = [], False
    for match in _TOKENS.finditer(source):
        kind = str(match.lastgroup)
        if kind == "directive":
            other = (other or "#else" in match[0]) and "#endif" not in match[0]
        elif kind != "space" and not other:
            found.append(Token(kind, match[0], *match.span()))
    return found


class _Finder:
    def __init__(self, source: str, file: str) -> None:
        self.source, self.file, self.tokens = source, file, _tokens(source)
        self.match: dict[int, int] = {}
        self.found: list[Site] = []
        opened: list[int] = []
        for i, token in enumerate(self.tokens):
            if token.text in ("(", "[", "{"):
                opened.append(i)
            elif token.text in (")", "]", "}"):
                self.match[i] = opened[-1]
                self.match[opened.pop()] = i

    def text(self, first: int, end: int) -> str:
        """The tokens [first, end) without comments."""
        pieces = [self.tokens[first].text] if first < end else []
        for i in range(first + 1, end):
            near = self.tokens[i - 1].end == self.tokens[i].start
            pieces.append(self.tokens[i].text if near else " " + self.tokens[i].text)
        return "".join(pieces)

    def at(self, i: int) -> str:
        """The text of a token."""
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def spaced(self, i: int) -> bool:
        """Whether there is space before and behind a token."""
        token = self.tokens[i]
        return self.source[token.start - 1].isspace() and self.source[token.end].isspace()

    def add(
        self, scope: str, operator: str, first: int, end: int, after: str, form: str = "expression"
    ) -> None:
        start = self.tokens[first].start
        line = self.source.count("\n", 0, start) + 1
        before = shortened(self.text(first, end))
        mutant = Mutant(self.file, scope, operator, before, shortened(after), line)
        self.found.append(Site(mutant, start, self.tokens[end - 1].end, form, after))

    def walk(self) -> None:
        """Finds the bodies of functions."""
        i = head = 0
        while i < len(self.tokens):
            if self.at(i) in (";", "}"):
                head = i + 1
            elif self.at(i) == "{":
                words = [self.at(j) for j in range(head, i)]
                if words[:1] == ["template"] and ">" in words:
                    words = words[words.index(">") + 1 :]
                is_type = not _TYPES.isdisjoint(words[:2]) and "enum" not in words[:1]
                if not is_type and ")" in words and self.source[self.tokens[i].start - 1].isspace():
                    name = head + [self.at(j) for j in range(head, i)].index("(") - 1
                    owner = self.at(name - 2) + "::" if self.at(name - 1) == "::" else ""
                    self._body(owner + self.at(name), i + 1, self.match[i])
                if not is_type:
                    i = self.match[i]
                head = i + 1
            i += 1

    def _body(self, scope: str, first: int, end: int) -> None:
        statements: list[tuple[int, int]] = []
        i = first
        while i < end:
            if self.at(i) in _OPAQUE:
                while self.at(i) not in (";", ":", ""):
                    i = self.match[i] + 1 if self.at(i) in ("(", "{", "[") else i + 1
                continue
            self._expressions(scope, i, first, end)
            if self._starts_statement(i, first) and (stop := self._statement(scope, i, end)):
                statements.append((i, stop))
            i += 1
        for (a, b), (c, d) in itertools.pairwise(statements):
            is_body = self.at(a - 1) in (")", "else", "do")  # of an `if` without braces, which ends behind it
            if (
                b == c
                and not is_body
                and "(" in (one := self.text(a, b))
                and "(" in (other := self.text(c, d))
            ):
                self.add(scope, "swapped statements", a, d, f"{other} {one}", "statement")

    def _starts_statement(self, i: int, first: int) -> bool:
        before = self.at(i - 1)
        if i == first or before in (";", "else", "do"):
            return not self._in_brackets(i, first)
        if before in ("{", "}"):
            brace = i - 1 if before == "{" else self.match[i - 1]
            return self.source[self.tokens[brace].start - 1].isspace()
        return before == ")" and self.at(self.match[i - 1] - 1) in ("if", "for", "while")

    def _in_brackets(self, i: int, first: int) -> bool:
        """Whether the token is inside the head of a `for` or an `if`."""
        j = i - 1
        while j >= first and self.at(j) not in ("(", "{"):
            j = self.match[j] - 1 if self.at(j) in (")", "}", "]") else j - 1
        return j >= first and self.at(j) == "("

    def _statement(self, scope: str, first: int, limit: int) -> int:
        """Adds the mutants of a statement that is an expression, and returns where it ends; 0 for others."""
        end = first
        while end < limit and self.at(end) != ";":
            end = self.match[end] + 1 if self.at(end) in ("(", "{", "[") else end + 1
        end += 1
        kind, text = self.tokens[first].kind, self.at(first)
        if _LOCKS.fullmatch(" ".join(self.at(i) for i in range(first, end))):
            opening = next(i for i in range(first, end) if self.at(i) == "(")
            self.add(scope, "dropped lock", opening + 1, self.match[opening], "", "lock")
            return 0
        if (
            _KEYWORDS.fullmatch(text)
            or (kind != "word" and text not in ("++", "--", "*", "(", "::"))
            or end > limit
        ):
            return 0
        if _DECLARATION.match(self.text(first, end)):
            return 0
        self.add(scope, "removed statement", first, end, "", "statement")
        for j in range(first, end):
            if self.at(j) in ("+=", "-=", "|=", "&=") or (self.at(j) in ("++", "--") and j == first):
                changed = self.text(first, j) + f" {_OTHER[self.at(j)]} " + self.text(j + 1, end)
                self.add(scope, "operator", first, end, changed, "statement")
        return end

    def _expressions(self, scope: str, i: int, first: int, end: int) -> None:
        token, text = self.tokens[i], self.at(i)
        if text in _PRECEDENCE and token.kind == "sign" and self.spaced(i):
            self._binary(scope, i, first, end)
        elif text in ("true", "false"):
            self.add(scope, "constant", i, i + 1, _OTHER[text])
        elif token.kind == "number" or (re.match(r"k[A-Z]", text) and self._is_plain(i)):
            self.add(scope, "constant", i, i + 1, f"{text} + 1")
        elif text == "!" and self.tokens[i + 1].start == token.end:
            stop = self._primary(i + 1)
            self.add(scope, "operator", i, stop, f"static_cast<bool>({self.text(i + 1, stop)})")
        elif text in ("if", "while") and self.at(i + 1) == "(":
            self._condition(scope, text, i + 1)
        elif text == "(" and self.tokens[i - 1].kind == "word" and not _KEYWORDS.fullmatch(self.at(i - 1)):
            self._arguments(scope, i)
        elif text == "?":
            start = self._left(i, -1, first)
            for always in ("true", "false"):
                self.add(scope, "skipped branch", start, i, always, "condition")

    def _is_plain(self, i: int) -> bool:
        return self.at(i - 1) not in ("::", ".", "->") and self.at(i + 1) not in ("(", "::", "{", "<")

    def _primary(self, i: int) -> int:
        while self.tokens[i].kind == "word" or self.at(i) in ("(", "[", "::", ".", "->"):
            i = self.match[i] + 1 if self.at(i) in ("(", "[") else i + 1
        return i

    def _left(self, i: int, precedence: int, first: int) -> int:
        j = i - 1
        while j >= first:
            text = self.at(j)
            if text in (")", "]", "}"):
                if text == "}" and self.source[self.tokens[self.match[j]].start - 1].isspace():
                    break
                j = self.match[j] - 1
                continue
            if text in _ENDS or (_PRECEDENCE.get(text, 99) < precedence and self.spaced(j)):
                break
            j -= 1
        return j + 1

    def _right(self, i: int, precedence: int, end: int) -> int:
        j = i + 1
        while j < end:
            text = self.at(j)
            if text in ("(", "[", "{"):
                j = self.match[j] + 1
                continue
            if text in _ENDS or (_PRECEDENCE.get(text, 99) <= precedence and self.spaced(j)):
                break
            j += 1
        return j

    def _binary(self, scope: str, i: int, first: int, end: int) -> None:
        sign = self.at(i)
        start, stop = self._left(i, _PRECEDENCE[sign], first), self._right(i, _PRECEDENCE[sign], end)
        if (
            start == i
            or stop == i + 1
            or any(self.tokens[j].kind == "text" or self.at(j) == "to_string" for j in range(start, stop))
        ):
            return
        left, right = self.text(start, i), self.text(i + 1, stop)
        kind = "comparison" if _PRECEDENCE[sign] in (5, 6) else "operator"
        self.add(scope, kind, start, stop, f"({left}) {_OTHER[sign]} ({right})")
        if sign in ("&&", "||"):
            self.add(scope, "skipped condition", start, stop, f"static_cast<bool>({left})")
            self.add(scope, "skipped condition", start, stop, f"static_cast<bool>({right})")

    def _condition(self, scope: str, keyword: str, opening: int) -> None:
        start, stop = opening + 1, self.match[opening]
        j = start
        while j < stop:
            if self.at(j) == ";":
                start = j + 1
            j = self.match[j] + 1 if self.at(j) in ("(", "[", "{") else j + 1
        if any(self.at(j) == "=" for j in range(start, stop)):
            return
        self.add(scope, "skipped branch", start, stop, "false", "condition")
        body = stop + 1
        while self.at(body) not in (";", "{", ""):
            body = self.match[body] + 1 if self.at(body) in ("(", "[") else body + 1
        behind = (self.match[body] if self.at(body) == "{" else body) + 1
        if keyword == "if" and self.at(behind) == "else":
            self.add(scope, "skipped branch", start, stop, "true", "condition")

    def _arguments(self, scope: str, opening: int) -> None:
        start = opening - 1
        while self.at(start - 1) in ("::", ".", "->") and self.tokens[start - 2].kind == "word":
            start -= 2
        before = self.tokens[start - 1]
        if (before.kind == "word" and before.text not in ("return", "else")) or before.text in (
            ">",
            ".",
            "->",
            "~",
        ):
            return
        if before.text in ("&", "*") and not self.spaced(start - 1):
            return
        edges, j = [opening], opening + 1
        while j <= self.match[opening]:
            if self.at(j) == "," or j == self.match[opening]:
                edges.append(j)
            j = self.match[j] + 1 if self.at(j) in ("(", "[", "{") else j + 1
        if len(edges) < 3:
            return
        one, other = self.text(edges[0] + 1, edges[1]), self.text(edges[1] + 1, edges[2])
        if one != other and self.at(opening - 1) not in _UNORDERED:
            rest = self.text(edges[2], self.match[opening] + 1)
            called = self.text(start, opening)
            self.add(
                scope, "exchanged arguments", start, self.match[opening] + 1, f"{called}({other}, {one}{rest}"
            )


def sites_of(source: str, file: str) -> list[Site]:
    """Returns all mutants of a file."""
    finder = _Finder(source, file)
    finder.walk()
    names = numbered(site.mutant for site in finder.found)
    return [site._replace(mutant=mutant) for site, mutant in zip(finder.found, names, strict=True)]


def planted(source: str, file: str, name: str, old: str, new: str) -> Site:
    """Returns a mutant that replaces a text: whole statements, or an expression."""
    if source.count(old) != 1:
        raise SystemExit(f"{file}: a planted bug no longer fits: {old!r}")
    start = source.index(old)
    mutant = Mutant(file, name, "planted", shortened(old), shortened(new), source.count("\n", 0, start) + 1)
    return Site(mutant, start, start + len(old), "statement" if old[-1] in ";}" else "expression", new)


def rewritten(source: str, path: str, chosen: Sequence[tuple[int, Site]]) -> str:
    """Returns the text of a file with these mutants. Errors in them are reported as in the file `mutant`."""
    ordered = sorted(chosen, key=lambda each: (each[1].start, -each[1].end, each[0]))
    return f'#include "mutation/switch.h"\n#line 1 "{path}"\n' + "".join(
        _rendered(source, path, 0, len(source), ordered)
    )


def _rendered(
    source: str, path: str, start: int, end: int, edits: Sequence[tuple[int, Site]]
) -> Iterator[str]:
    at, rest = start, list(edits)
    while rest:
        number, site = rest.pop(0)
        if site.start < at or site.end > end:
            continue  # crosses another one: it is never reached, and so not counted
        inside = [each for each in rest if each[1].start < site.end]
        rest = rest[len(inside) :]
        yield source[at : site.start]
        line = source.count("\n", 0, site.start) + 1
        here, back = f'\n#line {number} "mutant"\n', f'\n#line {line} "{path}"\n'
        original = "".join(_rendered(source, path, site.start, site.end, inside))
        if site.form == "lock":
            yield f"{here}::mutation::unless_dropped({number}, {original})"
        elif site.form == "statement":
            yield f"{{{here}if (::mutation::on({number})) {{ {site.alternative} }} else {{{back}{original} }} }}"
        elif site.form == "condition":
            yield f"{here}(::mutation::on({number}) ? {site.alternative} : static_cast<bool>({back}{original}))"
        else:
            yield f"{here}(::mutation::on({number}) ? ({site.alternative}) : ({back}{original}))"
        at = site.end
    yield source[at:end]
