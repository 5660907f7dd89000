# SPDX-License-Identifier: Apache-2.0
"""names.py FOLDER...: prints what the Python that runs this does not have, of what the sources in the folders use.

It compiles each source, and looks up every module, attribute and builtin of the standard library that the source names.
It needs nothing but that Python: no package, no built extension. Code is left out where it is under a condition on
`sys.version_info` or `TYPE_CHECKING`, or in a `try` that expects an ImportError.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_OF_MODULES = {"__file__", "__name__", "__doc__", "__path__", "__spec__", "__all__", "__debug__"}


def missing(path: Path) -> Iterator[str]:
    """Yields a line for each name in a source that this Python does not have."""
    try:
        tree = compile(path.read_text(encoding="utf-8"), str(path), "exec", ast.PyCF_ONLY_AST)
        compile(tree, str(path), "exec")
    except SyntaxError as error:
        yield f"{path}:{error.lineno}: {error.msg}"
        return
    nodes, names = list(_used(tree)), _bound(tree)
    modules = _imported(nodes)
    for node in nodes:
        for what in (*_not_imported(node), *_not_there(node, modules, names)):
            yield f"{path}:{getattr(node, 'lineno', 0)}: {what}"


def _imported(nodes: list[ast.AST]) -> dict[str, ModuleType]:
    """Returns the modules of the standard library, by the name that an `import` gives them."""
    found: dict[str, ModuleType] = {}
    for node in nodes:
        for alias in node.names if isinstance(node, ast.Import) else ():
            top = alias.name.partition(".")[0]
            module = _module(alias.name if alias.asname else top)
            if isinstance(module, ModuleType):
                found[alias.asname or top] = module
    return found


def _not_imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (found for alias in node.names if isinstance(found := _module(alias.name), str))
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        module = _module(node.module)
        if isinstance(module, str):
            yield module
        elif module is not None:
            for alias in node.names:
                if not hasattr(module, alias.name) and isinstance(
                    _module(f"{node.module}.{alias.name}"), str
                ):
                    yield f"{node.module} has no {alias.name}"


def _not_there(node: ast.AST, modules: dict[str, ModuleType], names: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        owner = _resolved(node.value, modules)
        if isinstance(owner, ModuleType) and not hasattr(owner, node.attr):
            yield f"{owner.__name__} has no {node.attr}"
    elif isinstance(node, ast.Name) and node.id not in names | _OF_MODULES and not hasattr(builtins, node.id):
        yield f"no builtin {node.id}"


def _used(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If) and any(
        name in ast.dump(node.test) for name in ("version_info", "TYPE_CHECKING")
    ):
        return
    if isinstance(node, ast.Try) and any(
        handler.type is None
        or any(name in ast.dump(handler.type) for name in ("ImportError", "ModuleNotFound"))
        for handler in node.handlers
    ):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _used(child)


def _module(name: str) -> ModuleType | str | None:
    """Returns a module of the standard library, None for one of another package, or what is wrong."""
    top = name.partition(".")[0]
    if top not in sys.stdlib_module_names and top not in ("tomllib",):
        return None
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return str(error)


def _resolved(node: ast.AST, modules: dict[str, ModuleType]) -> object:
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_resolved(node.value, modules), node.attr, None)
    return None


def _bound(tree: ast.AST) -> set[str]:
    """Returns every name that any scope of a source binds."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        else:
            names.add(str(getattr(node, "name", None)))  # functions, classes, handlers, patterns
    return names


if __name__ == "__main__":
    found = [
        line
        for folder in sys.argv[1:]
        for path in sorted(Path(folder).rglob("*.py"))
        for line in missing(path)
    ]
    print("\n".join(found))
    sys.exit(bool(found))
