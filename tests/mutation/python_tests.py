# SPDX-License-Identifier: Apache-2.0
"""Runs tests against Python mutants: pytest collects once, and each mutant has a fork of that process.

A plugin of pytest. KVLINK_MUTATION has the path of a plan in JSON. Each mutant is tried with the tests that reach it,
the fastest first, until one fails. One that is made while its module is imported has a process of its own instead.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import hashlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from mutation.mutants import Mutant, Outcome
from mutation.python_mutants import Importer, Switch

ROOT = Path(__file__).resolve().parents[2]
_AT_IMPORT = "at import"
"""How one ends that is made at import: with the tests that a process of its own tries."""
_AT_IMPORT_S = 60.0
"""How long the tests may take together, without a mutant, of one that is made at import."""
_LONG_S, _LAST_S = 600.0, 20.0
"""How long a test may take without a mutant, and the end of a process."""


def patience_s(normal_s: float) -> float:
    """Returns how long a test may take that takes `normal_s` without a mutant."""
    return 20 + 8 * normal_s


def forked(action: Callable[[Callable[[], object]], Any], limits: Sequence[float]) -> Any:
    """Returns what `action` returns in a fork of this process, "timeout", or "crashed".

    It is given a function to call after each of its steps, of which each has so many seconds.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(read)
        with open(write, "w") as told:  # noqa: PTH123
            json.dump(action(lambda: print(file=told, flush=True)), told)
        os._exit(0)
    os.close(write)
    text, left = b"", iter(limits)
    until = time.monotonic() + next(left)
    while select.select([read], [], [], max(0.0, until - time.monotonic()))[0]:
        part = os.read(read, 1 << 20)
        if not part:
            break
        for _ in range(part.count(b"\n")):
            until = time.monotonic() + next(left, _LAST_S)
        text += part
    else:
        text = b'"timeout"'
    os.close(read)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        return json.loads(text)
    except ValueError:  # there is none, or a part
        return "crashed"


class Server:
    """Tries all mutants of the plan once the tests are collected."""

    def __init__(self, plan: dict[str, Any], importer: Importer) -> None:
        self._plan, self._importer = plan, importer

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Takes the place of pytest's own loop."""
        items = {item.nodeid: item for item in session.items}
        gc.freeze()
        recorded = self._recorded(items)
        with Path(self._plan["results"]).open("w") as results:
            for name, number, users in self._plan["mutants"]:
                wanted = {name, *(users or ())}
                tests = sorted(
                    (seconds, test)
                    for test, (_, seconds, reached) in recorded.items()
                    if not wanted.isdisjoint(reached)
                )
                totals = itertools.accumulate(seconds for seconds, _ in tests)
                longest = min(self._plan["within"], _AT_IMPORT_S if users is not None else 1e9)
                within = bisect.bisect(list(totals), longest)
                tests = tests[: min(within + 1, self._plan["most"])]
                if users is not None:
                    line = [name, _AT_IMPORT, [test for _, test in tests]]
                else:
                    chosen = [items[test] for _, test in tests]
                    line = [name, *self._try(number, chosen, [patience_s(seconds) for seconds, _ in tests])]
                results.write(json.dumps(line) + "\n")
                results.flush()
        return True

    def _recorded(self, items: dict[str, pytest.Item]) -> dict[str, Any]:
        """When its file was written, how long it takes, and which mutants and files it reaches, by test.

        What an earlier run has seen of the same mutants is not checked again.
        """
        mutants = {name for name, *_ in self._plan["mutants"]} | self._plan["files"].keys()
        seen = Path(self._plan["seen"])
        before = json.loads(seen.read_text()) if seen.exists() else {"hooks": [], "tests": {}}
        known = before["tests"] if mutants.issubset(before["hooks"]) else {}
        written = {test: item.path.stat().st_mtime for test, item in items.items()}
        recorded = {
            test: known[test] for test, at in written.items() if test in known and known[test][0] == at
        }
        left = [item for test, item in items.items() if test not in recorded]
        if left:
            found = forked(lambda stepped: self._record(left, stepped), [_LONG_S] * len(left))
            if not isinstance(found, dict):
                raise SystemExit(f"the tests without a mutant: {found}")
            recorded |= {test: [written[test], *row] for test, row in found.items()}
            every = before["hooks"] if known else sorted(mutants)
            seen.write_text(json.dumps({"hooks": every, "tests": {**known, **recorded}}))
        return {test: row for test, row in recorded.items() if row[1] is not None}

    def _record(self, items: Sequence[pytest.Item], stepped: Callable[[], object]) -> dict[str, Any]:
        """How long each test takes, None if it does not pass, and what it reaches."""
        names = {number: name for name, number, _ in self._plan["mutants"]}
        recorded = {}
        for item, following in zip(items, [*items[1:], None], strict=True):
            Switch.reached.clear()
            began = time.monotonic()
            failed, skipped = _run(item, following)
            seconds = None if failed or skipped else time.monotonic() - began
            recorded[item.nodeid] = (
                seconds,
                sorted({names.get(each, "") if isinstance(each, int) else each for each in Switch.reached}),
            )
            stepped()
        return recorded

    def _try(self, number: int, items: Sequence[pytest.Item], limits: Sequence[float]) -> Sequence[str]:
        def action(stepped: Callable[[], object]) -> list[str]:
            Switch.active = number
            for item, following in zip(items, [*items[1:], None], strict=True):
                if _run(item, following)[0]:
                    return ["killed", item.nodeid]
                stepped()
            return ["survived", ""]

        if not items:
            return ["unreached", ""]
        outcome = forked(action, limits)
        return [outcome, ""] if isinstance(outcome, str) else outcome


def _run(item: pytest.Item, following: pytest.Item | None) -> tuple[bool, bool]:
    """Returns whether a test failed, and whether it was skipped."""
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, nextitem=following, log=False)
    return any(each.failed for each in reports), any(each.skipped for each in reports)


def pytest_configure(config: pytest.Config) -> None:
    """Starts the server; a process for one mutant has none."""
    if _PLAN and not _PLAN["active"]:
        config.pluginmanager.register(Server(_PLAN, _IMPORTER))


def try_all(
    chosen: Sequence[tuple[Mutant, set[str] | None]],
    tests: Sequence[str],
    most: int,
    within: float,
    folder: Path,
    results: Path,
) -> dict[str, Outcome]:
    """Returns by name how the tests end with each mutant: so many at most, or within so many seconds.

    It is written to `results` meanwhile.
    In `chosen`, a mutant that is made at import comes with the functions that use what is made, others with None.
    """
    files: dict[str, dict[str, int]] = {
        user.partition(":")[0]: {} for _, users in chosen for user in users or ()
    }
    for number, (mutant, _) in enumerate(chosen, 1):
        files.setdefault(mutant.file, {})[mutant.name] = number
    numbers = {name: number for of_file in files.values() for name, number in of_file.items()}
    rows = [
        (each.name, numbers[each.name], None if users is None else sorted(users)) for each, users in chosen
    ]
    plan = {
        "files": files,
        "mutants": rows,
        "active": 0,
        "results": str(results),
        "patches": {},
        "most": most,
        "within": within,
        "seen": str(folder / f"seen.{hashlib.sha256(repr(tests).encode()).hexdigest()[:8]}.json"),
    }
    results.unlink(missing_ok=True)
    _pytest(plan, tests, folder, timeout=None)
    outcomes = outcomes_of(results)
    for name, (status, reaching) in outcomes.items():
        if status == _AT_IMPORT:
            alone = {**plan, "active": numbers[name]}
            outcomes[name] = _alone(alone, reaching, folder) if reaching else Outcome("unreached")
    return outcomes


def outcomes_of(results: Path) -> dict[str, Outcome]:
    """Returns by name what is written down of the mutants that were tried."""
    lines = map(json.loads, results.read_text().splitlines()) if results.exists() else ()
    return {name: Outcome(status, detail) for name, status, detail in lines}


def try_patch(file: str, old: str, new: str, tests: Sequence[str], folder: Path) -> Outcome:
    """Returns how the tests end with a text replaced."""
    return _alone({"files": {}, "active": 1, "patches": {file: (old, new)}}, tests, folder)


def _alone(plan: dict[str, Any], tests: Sequence[str], folder: Path) -> Outcome:
    try:
        status, output = _pytest(plan, tests, folder, timeout=300)
    except subprocess.TimeoutExpired:
        return Outcome("timeout")
    if "file or directory not found" in output or status == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise SystemExit(output)
    failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    named = failed.partition(" - ")[0].partition(" ")[2]
    return Outcome({0: "survived", 1: "killed"}.get(status, "crashed"), named)


def _pytest(
    plan: dict[str, Any], tests: Sequence[str], folder: Path, timeout: float | None
) -> tuple[int, str]:
    written = folder / f"chosen.{os.getpid()}"
    written.write_text(json.dumps(plan))
    environment = {
        **os.environ, "KVLINK_MUTATION": str(written), "PYTHONPATH": str(ROOT / "tests"), "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    gate = "not engines and not netns and not softroce and not slow and not newcomer and not verify"
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-m", gate, "-p", "mutation.python_tests", "-p", "no:cacheprovider",
        "-p", "no:faulthandler", *tests,
    ]  # fmt: skip
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=timeout, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    (folder / "pytest.log").write_text(ended.stdout)
    return ended.returncode, ended.stdout


def _read_plan() -> tuple[Any, Any]:
    path = os.environ.get("KVLINK_MUTATION")
    if not path:
        return None, None
    plan = json.loads(Path(path).read_text())
    patches = {file: (old, new) for file, (old, new) in plan["patches"].items()}
    Switch.active = plan["active"]
    return plan, Importer(ROOT, plan["files"], patches)


_PLAN, _IMPORTER = _read_plan()
