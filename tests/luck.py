# SPDX-License-Identifier: Apache-2.0
"""Finds luck in the gate's tests: sleeping, judging by a clock, probing for a free port.

Usage: python tests/luck.py [FOLDER]. Prints a line for each finding and exits with 1 if there is one. A test that needs
real time is marked `verify`; what must stay in the gate all the same is in `_ALLOWED`, with the reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tiers import is_outside

_CLOCKS = {
    "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "thread_time", "time", "time_ns",
}  # fmt: skip
_LOOPS = {"asyncio", "loop", "get_running_loop", "get_event_loop"}
_CLOCK_OWNERS = {"time", *_LOOPS}

# "file" or "file:function", below tests/, and why it may.
_ALLOWED = {
    "control/replicas.py": "stands in for coordinators of tests in virtual time",
    "control/fleet.py": "load for tests outside the gate",
    "control_simulation/mutants.py:_hunt": "says how long a fault took to find; it judges nothing by that",
    "control_simulation/__main__.py:main": "says how long the seeds took; it judges nothing by that",
    "integrations/batching_peer.py": "the peers of test_transformers.py, which is outside the gate",
    "integrations/sglang_stand_in.py": "reads the clock as the class that it stands for does; no test waits for it",
    "mutation/cpp_tests.py:_recorded": "orders tests by how long they take, and bounds that of a mutant",
    "mutation/python_tests.py:forked": "ends a process that a mutant has made hang",
    "mutation/python_tests.py:_record": "orders tests by how long they take, and bounds that of a mutant",
    "metrics/conftest.py:free_port": "of tests outside the gate",
    "router/fake_engine.py": "paces a stand-in for a server; no test judges by it",
    "tracing/test_handoff_spans.py:test_a_warm_pull_on_the_callers_thread": "orders spans by the clock that they bear",
    "tracing/test_handoff_spans.py:test_offer_read_settle": "orders spans by the clock that they bear",
    "transfer/test_path_refusals.py:connect": "passes a deadline that no test reaches",
    "waiting.py": "the one way to wait for another thread or process: it polls, and judges nothing",
}

_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """One place where a test depends on luck."""

    path: str
    line: int
    function: str
    what: str

    def __str__(self) -> str:
        return f"tests/{self.path}:{self.line}: {self.function or 'the module'} {self.what}"


def findings(root: Path) -> Iterator[Finding]:
    """Yields what the gate's tests and their helpers below `root` do that depends on luck."""
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        folder = where.parts[0] if len(where.parts) > 1 else ""
        if not is_outside(folder, (), ()):
            yield from _of_module(ast.parse(path.read_text()), folder, where.as_posix())


def _of_module(module: ast.Module, folder: str, path: str) -> Iterator[Finding]:
    marks = _module_marks(module)
    if is_outside(folder, marks, ()):
        return
    virtual = _is_virtual(module)
    fixtures = _fixtures(module)
    for node in module.body:
        inner = [node] if not isinstance(node, ast.ClassDef) else [*node.body]
        above = _marks(node) if isinstance(node, ast.ClassDef) else set()
        for part in inner:
            if isinstance(part, _Function):
                if is_outside(folder, above | _marks(part), _closure(part.name, fixtures) | _arguments(part)):
                    continue
                yield from _of_body(part, path, part.name, virtual)
            else:
                yield from _of_body(part, path, "", virtual)


def _is_virtual(module: ast.Module) -> bool:
    """Whether its event loops are those of virtual_time.py, whose clock no machine moves, or of the simulation."""
    imports = [node.module or "" for node in module.body if isinstance(node, ast.ImportFrom)]
    return any(name == "virtual_time" or name.startswith("control_simulation.") for name in imports)


def _of_body(body: ast.AST, path: str, function: str, virtual: bool) -> Iterator[Finding]:
    calls = [node for node in ast.walk(body) if isinstance(node, ast.Call)]
    names = {_name(call.func) for call in calls}
    for call in calls:
        if virtual and _owner(call.func) in _LOOPS:
            continue
        name = _name(call.func)
        if name == "sleep" and not _is_zero(call):
            yield Finding(path, call.lineno, function, "sleeps")
        elif name in _CLOCKS and _owner(call.func) in _CLOCK_OWNERS:
            yield Finding(path, call.lineno, function, f"reads the clock ({ast.unparse(call)})")
        elif name == "getsockname" and _probes(names) and not _stays_bound(body):
            yield Finding(path, call.lineno, function, "probes for a free port")


def _probes(names: set[str]) -> bool:
    """Whether a socket is bound and serves nothing."""
    return "bind" in names and not names & {"listen", "create_server"}


def _stays_bound(body: ast.AST) -> bool:
    """Whether the port is used, or yielded, while the socket that bound it is open: it then belongs to the test."""
    for node in ast.walk(body):
        if isinstance(node, ast.With) and any("socket" in ast.unparse(item) for item in node.items):
            return any(isinstance(inner, ast.Yield | ast.Await | ast.With | ast.AsyncWith) for part in node.body
                       for inner in ast.walk(part))  # fmt: skip
    return False


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _owner(function: ast.expr) -> str:
    if not isinstance(function, ast.Attribute):
        return "time"
    owner = function.value
    return _name(owner.func if isinstance(owner, ast.Call) else owner)


def _is_zero(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def _arguments(function: _Function) -> set[str]:
    return {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}


def _marks(node: _Function | ast.ClassDef) -> set[str]:
    return {name for decorator in node.decorator_list for name in _mark_names(decorator)}


def _module_marks(module: ast.Module) -> set[str]:
    return {
        name
        for node in module.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["pytestmark"]
        for name in _mark_names(node.value)
    }


def _mark_names(expression: ast.expr) -> Iterator[str]:
    """Yields NAME of each pytest.mark.NAME, and the fixtures that a usefixtures mark names."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
            yield node.attr


def _fixtures(module: ast.Module) -> dict[str, set[str]]:
    """The arguments of each function of the module, fixtures among them."""
    return {node.name: _arguments(node) for node in module.body if isinstance(node, _Function)}


def _closure(name: str, fixtures: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [name]
    while left:
        new = fixtures.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def main(root: Path) -> int:
    """Prints the findings that are not allowed, and what is allowed in vain."""
    found = list(findings(root))
    used = {place for each in found for place in (each.path, f"{each.path}:{each.function}")} & set(_ALLOWED)
    bad = [each for each in found if not {each.path, f"{each.path}:{each.function}"} & set(_ALLOWED)]
    for each in bad:
        print(each)
    for place in sorted(set(_ALLOWED) - used):
        print(f"tests/luck.py allows {place} in vain")
    if bad:
        print('Take time as a value, or mark the test `verify`: CONTRIBUTING.md, "No luck in the gate".')
    return bool(bad or set(_ALLOWED) - used)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent))
