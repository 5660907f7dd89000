# SPDX-License-Identifier: Apache-2.0
"""Finds background work that an exception could end: threads, tasks and callbacks not started by supervised.py.

Usage: python tests/supervision.py. Prints a line for each finding and exits with 1 if there is one. What starts work in
another way for a good reason is in `_ALLOWED`. With --loops it prints the name and the places of each loop instead.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_FOLDERS = ("kvlink", "integrations", "benchmarks")
_HOME = "kvlink.runtime.supervised"

_TASKS = {"create_task", "ensure_future", "run_coroutine_threadsafe", "TaskGroup"}
_THREADS = {
    "Thread",
    "Timer",
    "start_new_thread",
    "ThreadingMixIn",
    "ThreadingTCPServer",
    "ThreadingHTTPServer",
}
_CALLBACKS = {
    "add_reader", "add_writer", "call_soon", "call_soon_threadsafe", "call_later", "call_at", "add_done_callback",
}  # fmt: skip
_FUTURES = {"submit", "run_in_executor"}
_STARTS = _TASKS | _THREADS | _CALLBACKS | _FUTURES
_WORDS = (*_STARTS, _HOME.rpartition(".")[2], "on_loop", "in_background")
"""A module without any of them starts nothing."""
_MODULES = {"asyncio", "threading", "_thread", "socketserver", "http.server"}

_NAMED = {"start_loop", "keep_running", "start_job", "guarded", "start_thread", "keep_calling"}
"""Functions of supervised.py whose first argument is the name of a loop."""
_NAMED_METHODS = {"keep_running", "on_loop"}
"""Methods of ControlThread whose first argument is, too."""

# "file" or "file:function", and why it may.
_ALLOWED = {
    "benchmarks/measurements": "an error ends a measurement, or it would print wrong numbers",
    "benchmarks/peers/adapters": "an error ends a measurement, or it would print wrong numbers",
    "benchmarks/scale": "an error ends a measurement, or it would print wrong numbers",
    "benchmarks/workloads": "an error ends a measurement, or it would print wrong numbers",
    "integrations/transformers/demo.py:decode": "gives a request to the loop of transformers, and starts nothing",
    "integrations/transformers/handoff.py:submit": "admits a handoff, and starts nothing itself",
    "integrations/vllm/prefill/announcements.py:announce": "counts its own errors, and outgoing.py reads the future",
    "integrations/vllm/prefill/announcements.py:take": "earlier_turns.py reads the future",
    "integrations/vllm/chats/peer_prefixes.py:find": "the lookups of prefixes read the future",
    "kvlink/runtime/background.py": "passes the names of its callers to supervised.py, and futures to its callers",
    "kvlink/control/security/reloading_channel.py:add_done_callback": "hands on a callback that its caller guards",
    "kvlink/coordinator/store/etcd/offers.py:_delete": "a group commit, whose failure the callback handles",
    "kvlink/coordinator/store/etcd/settle_orders.py:__anext__": "a group commit, whose failure changes nothing",
    "kvlink/monitoring/metrics/serving.py": "the threads of requests, which socketserver guards by handle_error",
    "kvlink/runtime/supervised.py": "starts all others",
    "kvlink/worker/prefixes.py:find": "returns the future to the caller of kvlink",
}  # fmt: skip

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """One place that starts background work in another way."""

    path: str
    line: int
    function: str
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.function or 'the module'} {self.what}"

    def places(self) -> set[str]:
        """Returns the keys of `_ALLOWED` that allow it."""
        folders = {parent.as_posix() for parent in Path(self.path).parents}
        return {self.path, f"{self.path}:{self.function}", *folders}


class Loop(NamedTuple):
    """One place that starts supervised work."""

    name: str
    path: str
    line: int


class _Module:
    """The starts of one module."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path.relative_to(root).as_posix()
        self.tree = ast.parse(path.read_text())
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.names = dict(_imported(self.tree))
        self.texts = _constants(self.tree)
        for here, (module, name) in self.names.items():
            beside = path.with_name(f"{module}.py")
            if name.isupper() and module and beside.exists():
                self.texts[here] = _constants(ast.parse(beside.read_text())).get(name)

    def findings(self) -> Iterator[Finding]:
        for node in ast.walk(self.tree):
            if (kind := self._kind(node)) and not self._is_annotation(node) and not self._is_fine(kind, node):
                yield self._finding(node, f"uses {kind}")
            if isinstance(node, ast.Call) and self._is_named(node) and self._loop_name(node) is None:
                yield self._finding(node, "starts a loop whose name is not written there")

    def loops(self) -> Iterator[Loop]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self._is_named(node) and (name := self._loop_name(node)):
                yield Loop(name, self.path, node.lineno)

    def _finding(self, node: ast.AST, what: str) -> Finding:
        inner: ast.AST | None = node
        while inner is not None and not isinstance(inner, _Function):
            inner = self.parents.get(inner)
        return Finding(self.path, getattr(node, "lineno", 0), inner.name if inner else "", what)

    def _kind(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute) and node.attr in _STARTS:
            return node.attr
        if isinstance(node, ast.Name) and self.names.get(node.id, ("", ""))[0] in _MODULES:
            name = self.names[node.id][1]
            return name if name in _STARTS else ""
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            name = getattr(node.args[1], "value", "")
            return name if isinstance(name, str) and name in _STARTS else ""
        return ""

    def _is_fine(self, kind: str, node: ast.AST) -> bool:
        call = self.parents.get(node)
        if not isinstance(call, ast.Call) or call.func is not node:
            return False
        if kind in _CALLBACKS:
            return any(self._home_name(each) == "guarded" or _discards(each) for each in call.args)
        if kind in _FUTURES:
            return self._is_awaited(call) or any(
                self._home_name(each) == "keep_running" for each in call.args
            )
        return False

    def _is_awaited(self, call: ast.Call) -> bool:
        above = self.parents.get(call)
        return isinstance(above, ast.Await) or (isinstance(above, ast.Attribute) and above.attr == "result")

    def _is_annotation(self, node: ast.AST) -> bool:
        above = self.parents.get(node)
        while above is not None and not isinstance(above, ast.stmt):
            if isinstance(above, ast.arg):
                return True
            node, above = above, self.parents.get(above)
        if isinstance(above, ast.AnnAssign):
            return node is above.annotation
        return isinstance(above, _Function) and node is above.returns

    def _home_name(self, node: ast.AST) -> str:
        """Returns the name of the function of supervised.py that `node` calls, or ""."""
        function = node.func if isinstance(node, ast.Call) else None
        if isinstance(function, ast.Name):
            module, name = self.names.get(function.id, ("", ""))
            return name if module == _HOME else ""
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            module, name = self.names.get(function.value.id, ("", ""))
            return function.attr if f"{module}.{name}" == _HOME else ""
        return ""

    def _is_named(self, call: ast.Call) -> bool:
        attribute = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        named = [each for each in call.keywords if each.arg == "name"] if attribute == "in_background" else []
        return self._home_name(call) in _NAMED or attribute in _NAMED_METHODS or bool(named)

    def _loop_name(self, call: ast.Call) -> str | None:
        named = [each.value for each in call.keywords if each.arg == "name"] or call.args[:1]
        if named and isinstance(named[0], ast.Constant) and isinstance(named[0].value, str):
            return named[0].value
        text = self.texts.get(named[0].id) if named and isinstance(named[0], ast.Name) else None
        return text if isinstance(text, str) else None


def _imported(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yields local names with the module and the name that they were imported from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                yield each.asname or each.name, (node.module or "", each.name)


def _constants(tree: ast.Module) -> dict[str, object]:
    """Returns the constants of a module by their names."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _discards(callback: ast.expr) -> bool:
    return (
        isinstance(callback, ast.Attribute) and callback.attr == "discard"
    )  # of a set, which raises nothing


def _modules(root: Path) -> Iterator[_Module]:
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            source = path.read_text()
            if any(word in source for word in _WORDS):
                yield _Module(root, path)


def findings(root: Path) -> list[Finding]:
    """Returns what starts background work in another way below `root`, and loops of two folders with one name."""
    modules = list(_modules(root))
    found = [each for module in modules for each in module.findings()]
    first: dict[str, Loop] = {}
    for loop in (each for module in modules for each in module.loops()):
        other = first.setdefault(loop.name, loop)
        if Path(other.path).parent != Path(loop.path).parent:
            found.append(
                Finding(loop.path, loop.line, "", f"has a loop with the name of {other.path}: {loop.name}")
            )
    return found


def loops(root: Path = ROOT) -> list[Loop]:
    """Returns every place that starts supervised work."""
    return [loop for module in _modules(root) for loop in module.loops()]


def main(root: Path, allowed: Iterable[str] = _ALLOWED) -> int:
    """Prints the findings that are not allowed, and what is allowed in vain."""
    allowed, found = set(allowed), findings(root)
    bad = [each for each in found if not each.places() & allowed]
    vain = allowed - {place for each in found for place in each.places()}
    for each in bad:
        print(each)
    for place in sorted(vain):
        print(f"tests/supervision.py allows {place} in vain")
    if bad:
        print('Start it by kvlink/runtime/supervised.py: CONTRIBUTING.md, "Background work".')
    return bool(bad or vain)


if __name__ == "__main__":
    if sys.argv[1:] == ["--loops"]:
        for each in sorted(loops()):
            print(f"{each.name}: {each.path}:{each.line}")
        sys.exit(0)
    sys.exit(main(ROOT))
