# SPDX-License-Identifier: Apache-2.0
"""Tries generated mutants of a module, or of the lines that a change adds, with the tests of the gate.

PYTHONPATH=tests python -m mutation [MODULE ... | all] [--base REF] [--sample N] [--seed N] [--seeds N]
    [--within S] [--kinds unit,model,simulation] [--each-kind] [--again]

Without a module: the mutants in lines that differ from REF. Each module's score goes to build/mutation/MODULE.json,
from where `python .ci/lanes.py record` takes it, and its survivors to build/mutation/MODULE.txt. Exits with 1 if a
module is below its bar, a planted bug is not found, or a mutant of a change survives.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mutation import cpp_mutants, cpp_tests, python_mutants, python_tests
from mutation.known import EQUIVALENT, PLANTED
from mutation.modules import MODULES, ROOT, files_of
from mutation.mutants import KILLED, Mutant, Outcome, interval, sample

FOLDER = ROOT / "build" / "mutation"
"""Has a score a module, in JSON, and its survivors."""
WORK = FOLDER / "work"
_SPARE = 1.4
"""So many times the sample is compiled, because some mutants of C++ do not."""


class Tried(NamedTuple):
    """A mutant with its outcomes by kind of test."""

    mutant: Mutant
    outcomes: dict[str, Outcome]

    @property
    def asserted(self) -> bool:
        """Says whether a test failed, rather than that its process died."""
        return any(outcome.status == "killed" for outcome in self.outcomes.values())

    def status(self, module: str) -> str:
        """Returns killed, timeout, equivalent or survived."""
        found = {outcome.status for outcome in self.outcomes.values()}
        if found & KILLED or self.mutant.name not in EQUIVALENT.get(module, {}):
            return "killed" if found & KILLED else "timeout" if "timeout" in found else "survived"
        return "equivalent"


def _sites(files: Iterable[str]) -> dict[str, python_mutants.Site | cpp_mutants.Site]:
    found: dict[str, python_mutants.Site | cpp_mutants.Site] = {}
    for file in files:
        source = (ROOT / file).read_text()
        if file.endswith(".py"):
            found |= {site.mutant.name: site for site in python_mutants.sites_of(ast.parse(source), file)}
        else:
            found |= {each.mutant.name: each for each in cpp_mutants.sites_of(source, file)}
    return found


def _try_cpp(chosen: dict[str, list[Any]], given: argparse.Namespace) -> Iterator[tuple[str, list[Tried]]]:
    """Tries the mutants of some modules in one build, one module after the other."""
    build = cpp_tests.Build(
        FOLDER, {folder for name in chosen for folder in MODULES[name].folders}, given.kinds
    )
    planted = {
        name: [
            cpp_mutants.planted((ROOT / each.file).read_text(), each.file, each.name, each.old, each.new)
            for each in PLANTED if each.module == name and given.modules
        ] for name in chosen
    }  # fmt: skip
    compiled = build.make([site for name in chosen for site in (*planted[name], *chosen[name])])
    print(f"{len(compiled)} mutants compile", flush=True)
    tests = build.record()
    for name in chosen:
        mine = {site.mutant for site in (*planted[name], *chosen[name])}
        of_module = [(number, site) for number, site in compiled.items() if site.mutant in mine]
        sites = of_module[: len(planted[name]) + given.sample]
        kept = _kept(name, [site for _, site in sites], given.again)
        tried = []
        for number, site in sites:
            outcomes = kept[site.mutant.name].outcomes
            for kind in given.kinds if not outcomes else ():
                if given.each_kind or not any(each.status in KILLED for each in outcomes.values()):
                    outcomes[kind] = build.try_one(number, [test for test in tests if test.kind == kind])
            tried.append(Tried(site.mutant, outcomes))
            _say(tried[-1])
            _keep(name, kept.values())
        yield name, tried


def _try_python(
    chosen: dict[str, list[python_mutants.Site]], given: argparse.Namespace
) -> dict[str, list[Tried]]:
    """Tries the mutants of modules that have the same tests."""
    tried = {name: _kept(name, sites, given.again) for name, sites in chosen.items()}
    for name, of_module in tried.items():
        _keep(name, of_module.values())
    mutants = {mutant: one for of_module in tried.values() for mutant, one in of_module.items()}
    tests = MODULES[next(iter(chosen))].tests
    for kind in (kind for kind in given.kinds if kind in tests):
        paths = [
            path
            for test in tests[kind]
            for path in ([test] if "::" in test else sorted(map(str, ROOT.glob(test))))
        ]
        left = [
            site for sites in chosen.values() for site in sites
            if kind not in (outcomes := mutants[site.mutant.name].outcomes)
            and (given.each_kind or not any(each.status in KILLED for each in outcomes.values()))
        ]  # fmt: skip
        if left:
            most, within = (given.seeds, 1e9) if kind == "simulation" else (10_000, given.within)
            asked = [(site.mutant, _users(site.mutant) if site.at_import else None) for site in left]
            ends = python_tests.try_all(asked, paths, most, within, WORK, _results(kind))
            for mutant, outcome in ends.items():
                mutants[mutant].outcomes[kind] = outcome
    for each in (each for each in PLANTED if each.module in chosen and given.modules):
        planted = Mutant(each.file, each.name, "planted", each.old, each.new, 0)
        outcome = python_tests.try_patch(each.file, each.old, each.new, each.tests, WORK)
        tried[each.module][each.name] = Tried(planted, {"unit": outcome})
    for one in (one for of_module in tried.values() for one in of_module.values()):
        _say(one)
    return {name: list(of_module.values()) for name, of_module in tried.items()}


@functools.cache
def _product() -> list[python_mutants.Piece]:
    paths = [path for folder in ("kvlink", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in paths}
    return python_mutants.pieces_of(trees)


def _users(mutant: Mutant) -> set[str]:
    return python_mutants.users_of(mutant, _product())


def _kept(name: str, sites: Sequence[python_mutants.Site], again: bool) -> dict[str, Tried]:
    """Mutants with what killed or hung them in the last run of their module: new tests undo neither.

    That run may have been cut off. What it had found by then counts too.
    """
    path = WORK / f"{name}.json"
    last = json.loads(path.read_text()) if again and path.exists() else {}
    for kind in ("unit", "simulation") if again else ():
        for mutant, outcome in python_tests.outcomes_of(_results(kind)).items():
            last.setdefault(mutant, {})[kind] = outcome
    return {
        site.mutant.name: Tried(
            site.mutant,
            {
                kind: Outcome(*each)
                for kind, each in last.get(site.mutant.name, {}).items()
                if any(status in (*KILLED, "timeout") for status, _ in last[site.mutant.name].values())
            },
        )
        for site in sites
    }


def _keep(name: str, tried: Iterable[Tried]) -> None:
    """Keeps what was found so far, from where a run with --again goes on."""
    (WORK / f"{name}.json").write_text(json.dumps({t.mutant.name: t.outcomes for t in tried}) + "\n")


def _results(kind: str) -> Path:
    """Returns where Python mutants are written down as they are tried."""
    return WORK / f"results.{kind}"


def _say(tried: Tried) -> None:
    told = ", ".join(f"{kind} {end.status} {end.test}".strip() for kind, end in tried.outcomes.items())
    print(f"  {tried.mutant.name} (line {tried.mutant.line}): {told}", flush=True)


def _try(
    files: dict[str, list[str]], lines: dict[str, set[int]] | None, given: argparse.Namespace
) -> Iterator[tuple[str, list[Tried]]]:
    """Tries a sample of the mutants of each module."""
    chosen: dict[str, list[Any]] = {}
    for name, of_module in files.items():
        sites = _sites(of_module)
        mutants = [
            site.mutant for site in sites.values() if not lines or site.mutant.line in lines[site.mutant.file]
        ]
        size = int(given.sample * (_SPARE if MODULES[name].folders else 1))
        chosen[name] = [sites[each.name] for each in sample(mutants, size, given.seed)]
        print(f"{name}: {len(chosen[name])} of {len(mutants)} mutants", flush=True)
    cpp = {name: sites for name, sites in chosen.items() if MODULES[name].folders}
    if any(cpp.values()):
        yield from _try_cpp(cpp, given)
    python = [name for name, sites in chosen.items() if sites and name not in cpp]
    while python:
        alike = [name for name in python if MODULES[name].tests == MODULES[python[0]].tests]
        yield from _try_python({name: chosen[name] for name in alike}, given).items()
        python = [name for name in python if name not in alike]


def _score(name: str, tried: Sequence[Tried], seed: int) -> dict[str, object]:
    generated = [each for each in tried if each.mutant.operator != "planted"]
    planted = [each for each in tried if each.mutant.operator == "planted"]
    counts = Counter(each.status(name) for each in generated)
    of = counts["killed"] + counts["survived"]
    low, high = interval(counts["killed"], of)
    kinds: dict[str, list[int]] = {}
    for each in generated:
        for kind, outcome in each.outcomes.items():
            killed, total = kinds.get(kind, (0, 0))
            kinds[kind] = [killed + (outcome.status in KILLED), total + 1]
    return {
        "module": name, "score": round(100 * counts["killed"] / max(of, 1)), "interval": [round(low), round(high)],
        **{status: counts[status] for status in ("killed", "survived", "timeout", "equivalent")}, "kinds": kinds,
        "crashed": sum(each.status(name) == "killed" and not each.asserted for each in generated),
        "planted": [sum(each.status(name) == "killed" for each in planted), len(planted)],
        "seed": seed, "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "ended": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }  # fmt: skip


def _judge(name: str, tried: Sequence[Tried], score: dict[str, object]) -> list[str]:
    """Returns what is wrong with the score of a module."""
    wrong = [
        f"not found: {each.mutant.scope}"
        for each in tried
        if each.mutant.operator == "planted" and each.status(name) != "killed"
    ]
    known = EQUIVALENT.get(name, {})
    wrong += [
        f"killed, though listed as equivalent: {each.mutant.name}"
        for each in tried
        if each.mutant.name in known and each.status(name) == "killed"
    ]
    if score["equivalent"] * 20 > len(tried):  # type: ignore[operator]
        wrong.append(f"{score['equivalent']} equivalent mutants are more than 5 %")
    if score["score"] < MODULES[name].bar:  # type: ignore[operator]
        wrong.append(f"{score['score']} % is below {MODULES[name].bar} %")
    return wrong


def _write(name: str, tried: Sequence[Tried], score: dict[str, object]) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(score) + "\n")
    _keep(name, tried)
    rows = [
        f"{t.status(name)} {t.mutant.line} {t.mutant.name} {t.outcomes}"
        for t in tried
        if t.status(name) != "killed"
    ]
    (FOLDER / f"{name}.txt").write_text("\n".join(rows) + "\n")


def _changed_lines(base: str) -> dict[str, set[int]]:
    """The lines that differ from a commit, by file."""
    found: dict[str, set[int]] = {}
    file = ""
    for line in _git("diff", "-U0", base).splitlines():
        if line.startswith("+++ "):
            file = line[6:]
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(match[1]), int(match[2] or 1)
            found.setdefault(file, set()).update(range(first, first + count))
    return found


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _base() -> str:
    bases = _git("branch", "--all", "--list", "origin/main", "--format=%(refname)").splitlines()
    return _git("merge-base", "HEAD", bases[0]) if bases else "HEAD~1"


def _try_change(given: argparse.Namespace) -> int:
    lines = _changed_lines(given.base or _base())
    files = {name: [file for file in files_of(name) if file in lines] for name in MODULES}
    survivors = [
        f"line {each.mutant.line}: {each.mutant.name}"
        for name, tried in _try({name: of for name, of in files.items() if of}, lines, given)
        for each in tried
        if each.status(name) == "survived"
    ]
    print(
        "these mutants of the change survive:" if survivors else "no mutant of the change survives",
        *survivors,
        sep="\n",
    )
    return len(survivors) > 0


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="mutation", description=__doc__)
    add = parser.add_argument
    add("modules", nargs="*", choices=[*MODULES, "all", []], help="by default the lines of a change")
    add("--base", help="what the change is compared with; by default the branch it will land on")
    add("--sample", type=int, default=0, help="how many mutants a module; by default 100, of a change 15")
    add("--seed", type=int, default=0)
    add("--seeds", type=int, default=8, help="of the gate's, of the control plane's simulation")
    add(
        "--within",
        type=float,
        default=1e9,
        help="seconds of tests for each mutant, of Python and the fastest",
    )
    add("--kinds", default="unit,model,simulation", help="of tests, in this order; by default all")
    add("--each-kind", action="store_true", help="goes on with the other kinds of test after a kill")
    add(
        "--again",
        action="store_true",
        help="only those that survived the last run of the module, or that it did not come to",
    )
    given = parser.parse_args(arguments)
    given.kinds = given.kinds.split(",")
    WORK.mkdir(parents=True, exist_ok=True)
    given.sample = given.sample or (100 if given.modules else 15)
    if not given.modules:
        return _try_change(given)
    wrong: list[str] = []
    names = MODULES if "all" in given.modules else given.modules
    for name, tried in _try({name: files_of(name) for name in names}, None, given):
        score = _score(name, tried, given.seed)
        _write(name, tried, score)
        print(json.dumps(score), flush=True)
        wrong += [f"{name}: {each}" for each in _judge(name, tried, score)]
    print("\n".join(wrong) or "all modules are above their bars")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
