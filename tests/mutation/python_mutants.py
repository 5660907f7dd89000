# SPDX-License-Identifier: Apache-2.0
"""Mutants of Python modules: all that were chosen are compiled into a module, and a number switches one on.

`mutant_on(7)` in the rewritten module says whether mutant 7 is switched on, and records that it was reached. Each
function records itself too, as "file:name".
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar, NamedTuple

from mutation.mutants import Mutant, numbered, shortened

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
_LOCKS = ("lock", "mutex")
_UNORDERED = {"isinstance", "getattr", "cast", "min", "max"}
"""Functions whose first two arguments are not exchanged: nothing would change, or all would fail."""
_PURE = {
    "min",
    "max",
    "len",
    "sum",
    "bool",
    "int",
    "float",
    "bytes",
    "list",
    "set",
    "dict",
    "tuple",
    "replace",
}
"""Functions that see and change nothing but what they are given."""
_TEXTS = {"__repr__", "__str__"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Site(NamedTuple):
    """A mutant and how to make it: `node` becomes `alternative`, or `before` is done ahead of it."""

    mutant: Mutant
    node: ast.AST
    alternative: ast.expr | list[ast.stmt]
    ahead_of: ast.stmt | None = None
    """A statement that `node` is moved ahead of."""
    at_import: bool = False


class Piece(NamedTuple):
    """A function, or a statement outside of functions: what it defines, and which names it mentions."""

    file: str
    node: ast.stmt
    defines: frozenset[str]
    mentions: frozenset[str]


def _pieces(file: str, body: Sequence[ast.stmt], owner: str = "") -> Iterator[Piece]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _pieces(file, node.body, node.name)
            continue
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        stored = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        attributes = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        made = {node.name} if isinstance(node, _FUNCTIONS) else {*stored, owner} - {"__all__", ""}
        yield Piece(file, node, frozenset(made), frozenset({each.id for each in names} | attributes))


def pieces_of(trees: Mapping[str, ast.Module]) -> list[Piece]:
    """Returns the pieces of all modules, given by file."""
    return [piece for file, tree in trees.items() for piece in _pieces(file, tree.body)]


def users_of(mutant: Mutant, pieces: Sequence[Piece]) -> set[str]:
    """Returns as "file:name" the functions that use what is made where a mutant is, also by other statements."""
    names: set[str] = set()
    for piece in pieces:
        last = piece.node.end_lineno or piece.node.lineno
        if piece.file == mutant.file and piece.node.lineno <= mutant.line <= last:
            names |= piece.defines
    before = -1
    while len(names) > before:
        before = len(names)
        for piece in pieces:
            if not isinstance(piece.node, _FUNCTIONS) and piece.mentions & names:
                names |= piece.defines
    functions = (piece for piece in pieces if isinstance(piece.node, _FUNCTIONS))
    return {f"{each.file}:{each.node.name}" for each in functions if names & (each.defines | each.mentions)}


def _is_log(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in _LOGS


def _only_logs(node: ast.AST) -> bool:
    """Whether a statement does no more than to write a line into the log."""
    if isinstance(node, ast.If):
        return all(map(_only_logs, (*node.body, *node.orelse)))
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and _is_log(node.value))


def _expressions(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The alternatives of an expression."""
    match node:
        case ast.Compare():
            for i, comparison in enumerate(node.ops):
                other = copy.deepcopy(node)
                other.ops[i] = _COMPARISONS[type(comparison)]()
                yield "comparison", other
        case ast.BoolOp():
            yield "operator", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
            for i in range(len(node.values)):
                rest = [*node.values[:i], *node.values[i + 1 :]]
                yield "skipped condition", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not()):
            yield "operator", node.operand
        case ast.BinOp() if type(node.op) in _OPERATORS and not any(
            isinstance(side, ast.JoinedStr)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        ):
            yield "operator", ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right)
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.IfExp():
            yield "skipped branch", node.body
            yield "skipped branch", node.orelse
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            same = ast.unparse(first) == ast.unparse(second) or isinstance(second, ast.Starred)
            if not same and not (isinstance(node.func, ast.Name) and node.func.id in _UNORDERED):
                yield "exchanged arguments", ast.Call(node.func, [second, first, *rest], node.keywords)


def _statements(node: ast.stmt) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The alternatives of a statement."""
    match node:
        case ast.Expr(value=ast.Await()):
            yield "removed await", []
        case ast.Expr(value=ast.Call()) if not _is_log(node.value) and "super()" not in ast.unparse(node):
            yield "removed statement", []
        case (
            ast.Assign(targets=[ast.Attribute() | ast.Subscript()])
            | ast.AugAssign()
            | ast.Delete()
            | ast.Raise()
        ):
            yield "removed statement", []
            if isinstance(node, ast.AugAssign) and type(node.op) in _OPERATORS:
                yield "operator", [ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)]
        case ast.With() | ast.AsyncWith() if all(
            item.optional_vars is None and any(word in ast.unparse(item).lower() for word in _LOCKS)
            for item in node.items
        ):
            yield "dropped lock", node.body


def _conditions(node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The conditions below `node` that a branch depends on, and what each may always be."""
    if isinstance(node, ast.If | ast.While):
        yield node.test, False
        if isinstance(node, ast.If) and node.orelse:
            yield node.test, True
    if isinstance(node, ast.comprehension):
        yield from ((each, True) for each in node.ifs)


def _is_called(node: ast.AST) -> bool:
    """Whether something below `node` is called that may see or change other things."""
    return any(
        isinstance(each, ast.Await)
        or (isinstance(each, ast.Call) and not (isinstance(each.func, ast.Name) and each.func.id in _PURE))
        for each in ast.walk(node)
    )


def _order_matters(one: ast.AST, other: ast.AST) -> bool:
    """Whether the order of two statements can be seen: a call may see it, but not that of another local name."""
    for node, beside in ((one, other), (other, one)):
        if not _is_called(node) and isinstance(node, ast.Assign):
            used = {each.id for each in ast.walk(beside) if isinstance(each, ast.Name)}
            names = [each for target in node.targets for each in getattr(target, "elts", (target,))]
            if all(isinstance(each, ast.Name) and each.id not in used for each in names):
                return False
    return _is_called(one) or _is_called(other)


def _is_store(node: ast.AST) -> bool:
    simple = isinstance(node, ast.Assign | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call | ast.Await)
    )
    return simple and not any(_is_log(each) for each in ast.walk(node))


class _Finder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Site] = []

    def add(self, scope: list[str], operator: str, node: Any, alternative: Any, **more: Any) -> None:
        after = "" if isinstance(alternative, list) and not alternative else alternative
        text = "; ".join(map(ast.unparse, after)) if isinstance(after, list) else after and ast.unparse(after)
        moved = more.get("ahead_of")
        mutant = Mutant(
            self.file, ".".join(scope) or "module", operator, shortened(ast.unparse(node)),
            shortened(f"ahead of {ast.unparse(moved)}" if moved else text), node.lineno,
        )  # fmt: skip
        early = not self._in_function(scope)
        self.found.append(Site(mutant, node, copy.deepcopy(alternative), at_import=early, **more))

    @staticmethod
    def _in_function(scope: list[str]) -> bool:
        return bool(scope) and not scope[-1].endswith("{}")

    def walk(self, node: ast.AST, scope: list[str]) -> None:
        """Checks everything below `node` that is not text, an annotation or a pattern."""
        if isinstance(node, ast.JoinedStr | ast.pattern) or _is_log(node) or _only_logs(node):
            return
        if isinstance(node, _FUNCTIONS) and node.name in _TEXTS:
            return
        if isinstance(node, ast.expr):
            for operator, alternative in _expressions(node):
                self.add(scope, operator, node, alternative)
        elif isinstance(node, ast.stmt):
            for operator, instead in _statements(node):
                self.add(scope, operator, node, instead)
        for condition, always in _conditions(node):
            self.add(scope, "skipped branch", condition, ast.Constant(always))
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom):
            return
        for name, below in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params", "test_"):
                continue
            self._below(node, name, below if isinstance(below, list) else [below], scope)

    def _below(self, node: ast.AST, name: str, below: Sequence[Any], scope: list[str]) -> None:
        inner = scope
        if name == "body" and isinstance(node, _FUNCTIONS):
            inner = [*(each.removesuffix("{}") for each in scope), node.name]
        elif name == "body" and isinstance(node, ast.ClassDef):
            inner = [*scope, node.name + "{}"]
        elif isinstance(node, ast.Lambda):
            inner = [*(each.removesuffix("{}") for each in scope), "lambda"]
        for i, each in enumerate(below):
            if not isinstance(each, ast.AST):
                continue
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                continue  # a docstring
            defines = not self._in_function(inner) and isinstance(each, ast.Assign)  # such as a type variable
            if (
                i
                and _is_store(each)
                and _is_store(below[i - 1])
                and not defines
                and _order_matters(each, below[i - 1])
            ):
                self.add(inner, "swapped statements", each, [], ahead_of=below[i - 1])
            self.walk(each, inner)


def sites_of(tree: ast.Module, file: str) -> list[Site]:
    """Returns all mutants of a module. The nodes are those of `tree`."""
    finder = _Finder(file)
    finder.walk(tree, [])
    names = numbered(site.mutant for site in finder.found)
    return [site._replace(mutant=mutant) for site, mutant in zip(finder.found, names, strict=True)]


def _on(number: int | str) -> ast.expr:
    return ast.Call(ast.Name("mutant_on", ast.Load()), [ast.Constant(number)], [])


class _Switcher(ast.NodeTransformer):
    """Puts each alternative beside what it stands for."""

    def __init__(self, file: str, chosen: Sequence[tuple[int, Site]]) -> None:
        self._file = file
        self._alternatives: dict[int, list[tuple[int, Any]]] = {}
        self._ahead: dict[int, list[tuple[int, ast.stmt]]] = {}
        for number, site in chosen:
            self._alternatives.setdefault(id(site.node), []).append((number, site.alternative))
            if site.ahead_of:
                moved = copy.deepcopy(site.node)
                self._ahead.setdefault(id(site.ahead_of), []).append((number, moved))  # type: ignore[arg-type]

    def visit(self, node: ast.AST) -> Any:
        alternatives, ahead = self._alternatives.get(id(node), ()), self._ahead.get(id(node), ())
        self.generic_visit(node)
        if isinstance(node, _FUNCTIONS):
            after_docstring = 1 if ast.get_docstring(node, clean=False) is not None else 0
            node.body.insert(after_docstring, ast.Expr(_on(f"{self._file}:{node.name}")))
        if isinstance(node, ast.stmt):
            now: list[ast.stmt] = [node]
            for number, alternative in alternatives:
                now = [ast.If(_on(number), alternative or [ast.Pass()], now)]
            return [*(ast.If(_on(number), [moved], []) for number, moved in ahead), *now]
        for number, alternative in alternatives:
            node = ast.IfExp(_on(number), alternative, node)
        return node


def rewritten(source: str, file: str, chosen: dict[str, int]) -> CodeType:
    """Returns the code of a module in which the mutants of these names are switched by their numbers."""
    tree = ast.parse(source)
    wanted = [(chosen[site.mutant.name], site) for site in sites_of(tree, file) if site.mutant.name in chosen]
    switched = ast.fix_missing_locations(_Switcher(file, wanted).visit(tree))
    return compile(switched, file, "exec", dont_inherit=True)


class Switch:
    """Which mutant is on, and which mutants and functions were reached since `reached` was cleared."""

    active = 0
    reached: ClassVar[set[int | str]] = set()

    @classmethod
    def on(cls, number: int | str) -> bool:
        """Returns whether a mutant is switched on."""
        cls.reached.add(number)
        return number == cls.active


class Importer(importlib.abc.MetaPathFinder):
    """Rewrites modules as they are imported. `chosen` has the mutants' numbers by file and name."""

    def __init__(
        self, root: Path, chosen: dict[str, dict[str, int]], patches: dict[str, tuple[str, str]]
    ) -> None:
        self._root, self._chosen, self._patches = root, chosen, patches
        builtins.mutant_on = Switch.on  # type: ignore[attr-defined]
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        """Finds what the other importers find, with another loader."""
        if not name.startswith("kvlink"):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        origin = Path(spec.origin or "")
        file = str(origin.relative_to(self._root)) if origin.is_relative_to(self._root) else ""
        if file in self._chosen or file in self._patches:
            spec.loader = _Loader(name, str(origin), self._code)
        return spec

    def _code(self, origin: str) -> CodeType:
        file = str(Path(origin).relative_to(self._root))
        source = Path(origin).read_text()
        if file in self._patches:
            old, new = self._patches[file]
            if source.count(old) != 1:
                raise SystemExit(f"{file}: a planted bug no longer fits: {old!r}")
            source = source.replace(old, new)
        return rewritten(source, file, self._chosen.get(file, {}))


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, code: Any) -> None:
        super().__init__(name, path)
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self._code(self.path)
        return code
