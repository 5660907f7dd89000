# SPDX-License-Identifier: Apache-2.0
"""vLLM's Python source as facts: which modules have which names, and which classes have which members. Imports nothing.

A tree is a folder with `vllm/`. Those of the versions that have no package for CPUs are made by `.ci/vllm-source`.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from servers import ENGINES

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ClassSource:
    """A class with those of vLLM that it extends, itself first."""

    name: str
    line: tuple[ast.ClassDef, ...]

    @functools.cached_property
    def functions(self) -> dict[str, Function]:
        found: dict[str, Function] = {}
        for node in self.line:
            for each in node.body:
                if isinstance(each, Function):
                    found.setdefault(each.name, each)
        return found

    @functools.cached_property
    def fields(self) -> list[str]:
        """Names that have values in the class, or get them in one of its methods, those of its bases last."""
        return [name for node in self.line for name in _fields(node)]

    def has(self, name: str) -> bool:
        return name in self.functions or name in self.fields

    def extends(self, name: str) -> bool:
        return any(node.name == name for node in self.line)


class Source:
    """One tree."""

    def __init__(self, root: Path) -> None:
        self.root = root
        described = [*root.glob("vllm*.dist-info/METADATA"), root / "PKG-INFO"]
        text = next((file.read_text() for file in described if file.exists()), "")
        found = re.search(r"^Version: (\S+)", text, re.MULTILINE)
        self.version = found[1] if found else root.name

    @functools.cache  # noqa: B019  a few trees live as long as the tests
    def names_in(self, module: str) -> dict[str, ast.stmt]:
        """The top-level names of a module, whatever they are. Raises FileNotFoundError."""
        found: dict[str, ast.stmt] = {}
        for node in _statements(ast.parse(self._file(module).read_text()).body):
            for name in _bound(node):
                found.setdefault(name, node)
        return found

    def is_module(self, module: str) -> bool:
        return self._file(module).exists()

    def found(self, module: str, name: str) -> tuple[str, ast.stmt]:
        """Where a name is defined, through imports. Raises KeyError if it is not."""
        node = self.names_in(module)[name]
        if not isinstance(node, ast.ImportFrom):
            return module, node
        origin = _absolute(module, node, self._file(module).name == "__init__.py")
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return self.found(origin, original)

    def class_of(self, module: str, name: str) -> ClassSource:
        module, node = self.found(module, name)
        assert isinstance(node, ast.ClassDef), f"{module}.{name} is no class"
        line = [node]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.names_in(module):
                at, extended = self.found(module, base.id) if self._is_ours(module, base.id) else ("", None)
                if isinstance(extended, ast.ClassDef):
                    line += self.class_of(at, base.id).line
        return ClassSource(name, tuple(line))

    def classes_in(self, module: str) -> list[ClassSource]:
        nodes = self.names_in(module).items()
        return [self.class_of(module, name) for name, node in nodes if isinstance(node, ast.ClassDef)]

    def _file(self, module: str) -> Path:
        """The file of a module or package, which need not exist."""
        path = self.root / module.replace(".", "/")
        file = path.with_suffix(".py")
        return file if file.exists() else path / "__init__.py"

    def _is_ours(self, module: str, name: str) -> bool:
        node = self.names_in(module)[name]
        if not isinstance(node, ast.ImportFrom):
            return isinstance(node, ast.ClassDef)
        return bool(node.level) or (node.module or "").startswith("vllm")


def trees() -> dict[str, Source]:
    """The trees of this machine by version: in build/engines, and those that KVLINK_VLLM_SOURCE names."""
    roots = [*ENGINES.glob("vllm/lib/python*/site-packages"), *ENGINES.glob("vllm-*")]
    named = filter(None, os.environ.get("KVLINK_VLLM_SOURCE", "").split(os.pathsep))
    sources = [Source(root) for root in (*roots, *map(Path, named)) if (root / "vllm").is_dir()]
    return {source.version: source for source in sources}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a module, also those under `if` and `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "handlers", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                for each in getattr(node, part, ()):
                    yield from _statements(each.body if isinstance(each, ast.ExceptHandler) else [each])


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | Function):
        yield node.name
    elif isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *filter(None, [node.module])])


def _fields(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if isinstance(each, ast.Assign | ast.AnnAssign):
            yield from _bound(each)
        elif isinstance(each, Function):
            inner = (one for one in ast.walk(each) if isinstance(one, ast.Attribute))
            yield from (
                one.attr
                for one in inner
                if isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self"
            )
