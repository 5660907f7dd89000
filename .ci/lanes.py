# SPDX-License-Identifier: Apache-2.0
"""Runs test lanes, remembers how they ended, and picks those that a change touches.

lanes.py run NAME...       runs lanes one after the other; build/lanes/NAME.json has how each ended
lanes.py verify            runs every lane of tier 2
lanes.py changed [RANGE]   runs the lanes of tier 2 that a change touches, and names those of tier 3 to run by hand
lanes.py names [RANGE]     only names them
lanes.py show              shows how each lane ended last, and what has changed since its last green run
lanes.py stale             lists the lanes whose sources have changed since then, the oldest first
lanes.py record            commits how lanes ended here as .ci/lanes.json, which has the newest run of each lane and
                           the newest mutation score of each module
lanes.py resolve           ends a conflict of merged branches in that file, by the newest run of each lane

RANGE is for `git diff`; without it, the working tree is compared with origin/main, or with the commit before.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "lanes"
SCORES = ROOT / "build" / "mutation"
RECORD = ".ci/lanes.json"
Result = dict[str, Any]
"""How a lane ended. `green` has the commit and the time of its last run without a failure, or None."""


class Lane(NamedTuple):
    """One command, and the tier that it belongs to."""

    command: str
    tier: int


LANES = {
    "transports": Lane("make test-transports", 2),
    "fabric": Lane("make test-fabric", 2),
    "capi": Lane("make test-capi", 2),
    "nixl": Lane("make test-nixl", 3),
    "hostile": Lane("make test-hostile", 2),
    "processes": Lane("make test-processes", 2),
    "simulate": Lane("make simulate", 2),
    "netns": Lane("make test-netns", 2),
    "deploy": Lane("make test-deploy", 2),
    "pages": Lane("make test-pages", 2),
    "instructions": Lane("make test-instructions", 2),
    "sanitizers": Lane("make test-sanitizers", 2),
    "docs": Lane("make docs", 2),
    "mutation": Lane("make mutate", 2),
    "pythons": Lane("make test-pythons", 2),
    "image": Lane("make test-image", 3),
    "extras": Lane("make test-extras", 3),
    "rdma": Lane("make test-rdma", 3),
    "engines": Lane("make test-engines", 3),
    "gpu": Lane("pytest -m gpu", 3),
    "slow": Lane("make test-slow", 3),
    "soak": Lane("make soak", 3),
    "newcomer": Lane("make test-newcomer", 3),
    "release": Lane("make same-bytes", 3),
    "aarch64": Lane("make test-aarch64", 3),
}

# The first row whose pattern begins a changed path tells its lanes. The gate is run for every change.
TOUCHED: Sequence[tuple[str, Iterable[str]]] = (
    (r"csrc/transports/fabric", ("fabric", "sanitizers")),
    (r"csrc/transports/verbs", ("transports", "sanitizers", "rdma")),
    (r"csrc/(transports/cuda|staging|device)", ("transports", "sanitizers", "gpu")),
    (
        r"csrc/transports/(cma|shm|same_host|tcp)",
        ("transports", "hostile", "sanitizers", "instructions", "soak"),
    ),
    (r"csrc/(capi|codec)/", ("capi", "instructions")),
    (r"csrc/bindings", ("transports",)),
    (r"csrc/.*\.md$", ()),
    (
        r"CMakeLists\.txt",
        ("capi", "transports", "sanitizers", "instructions", "soak", "image", "release"),
    ),
    (
        r"csrc/(engine|lease|staging)/",
        ("transports", "sanitizers", "instructions", "soak", "simulate", "capi"),
    ),
    (r"csrc/(memory|bench)/", ("transports", "sanitizers", "instructions", "soak", "capi", "aarch64")),
    (r"csrc/", ("transports", "sanitizers", "instructions", "soak", "capi")),
    (
        r"kvlink/control/(rpc|client|session)",
        ("transports", "processes", "simulate", "netns", "deploy", "docs"),
    ),
    (r"kvlink/(control|coordinator)/|protos/", ("processes", "simulate", "deploy", "docs")),
    (r"kvlink/monitoring/status_page/", ("processes", "pages", "docs")),
    (r"kvlink/(monitoring|cli|doctor)", ("processes", "deploy", "docs")),
    (r"kvlink/hardware/", ("transports", "docs", "gpu")),
    (r"kvlink/demo|kvlink/tracing|integrations/router/", ("processes", "docs")),
    (r"kvlink/_(core|bench)", ("transports", "processes", "pythons", "docs")),
    (r"kvlink/", ("transports", "processes", "docs")),
    (r"integrations/nixl/|packaging/nixl/", ("nixl",)),
    (r"integrations/deploy/image", ("deploy", "image", "slow")),
    (r"integrations/deploy", ("deploy",)),
    (r"integrations/", ("processes", "docs", "engines")),
    (r"benchmarks/instructions", ("instructions",)),
    (r"benchmarks/(peers|results)", ()),
    (r"benchmarks/report/", ("processes", "pages")),
    (r"benchmarks/", ("processes",)),
    (r"packaging/", ("image", "release")),
    (r"tests/transports/.*gpu", ("transports", "gpu")),
    (r"tests/transports/|tests/fake_cuda/", ("transports",)),
    (r"tests/hostile_peers/", ("hostile",)),
    (r"tests/capi/", ("capi",)),
    (r"tests/nixl/", ("nixl",)),
    (r"tests/netns/", ("netns",)),
    (r"tests/deploy/test_image_steps|tests/newcomer/fresh_root", ("image", "newcomer")),
    (r"tests/deploy/", ("deploy", "slow")),
    (r"tests/pages/", ("pages",)),
    (r"tests/newcomer/|README\.md", ("newcomer",)),
    (r"docs/getting-started/|docs/operate/(monitoring|systemd)\.md", ("docs", "newcomer")),
    (r"tests/softroce/", ("rdma",)),
    (r"tests/engines/", ("engines",)),
    (r"tests/gpu/", ("gpu",)),
    (r"tests/cpp/", ("sanitizers",)),
    (r"tests/soak/", ("soak",)),
    (r"tests/pythons/|\.ci/pythons", ("pythons",)),
    (r"tests/mutation/", ("mutation",)),
    (r"tests/control_simulation/", ("processes", "simulate")),
    (r"tests/(simulation|memory_model)/", ("simulate", "sanitizers")),
    (r"tests/(docs|smoke|unit|loops|transfer|worker|hardware|coordinator|cli|doctor)/|tests/[^/]*\.py$", ()),
    (r"tests/", ("processes",)),
    (r"\.ci/lanes\.", ()),
    (r"\.ci/(release-wheel|same-bytes|test-wheel|test-aarch64)", ("release", "aarch64")),
    (
        r"pyproject\.toml|constraints\.txt|Makefile|\.ci/",
        ("processes", "deploy", "pythons", "image", "extras", "newcomer", "release"),
    ),
    (r"docs/examples/", ("processes", "docs", "newcomer")),
    (
        r"docs/(troubleshooting|hardware/(rdma|gpudirect)|operate/(runbook|security)|servers/transformers)",
        ("docs", "newcomer"),
    ),
    (r"docs/(_static|_templates|conf)", ("docs", "pages")),
    (r"docs/", ("docs",)),
    (r"[^/]*\.md$|LICENSE|NOTICE|\.git|\.clang-format", ()),
)

# These have mutants, which run beside the lanes above.
MUTATED = (
    r"csrc/(lease|engine|plan|staging)/|kvlink/(control|coordinator|worker|transfer)/|integrations/vllm/"
)

_COUNTS = (
    re.compile(r"(?P<count>\d+) (?P<kind>passed|failed|skipped|errors?)\b"),
    re.compile(r"\[  (?P<kind>PASSED|FAILED)  \] (?P<count>\d+) tests?"),
)


def touched(paths: Iterable[str]) -> list[str]:
    """Returns the lanes that a change of `paths` touches, in the order in which they run."""
    found: set[str] = set()
    for path in paths:
        row = next((lanes for pattern, lanes in TOUCHED if re.match(pattern, path)), None)
        if row is None:
            raise SystemExit(
                f"{path}: no row of TOUCHED in .ci/lanes.py says which lanes it touches; add one"
            )
        found.update(row)
        if re.match(MUTATED, path):
            found.add("mutation")
    return [name for name in LANES if name in found]


def counts(output: str) -> Counter[str]:
    """Returns how many tests passed, failed and were skipped, by the closing lines of pytest and GoogleTest."""
    found: Counter[str] = Counter()
    for line in output.splitlines():
        closing = re.search(r"\bin \d+(\.\d+)?s\b", line) or line.startswith("[  ")
        for pattern in _COUNTS:
            for match in pattern.finditer(line) if closing else ():
                kind = match["kind"].lower().replace("errors", "failed").replace("error", "failed")
                found[kind] += int(match["count"])
    return found


def run(name: str) -> bool:
    """Runs a lane; its output goes to the terminal and to build/lanes/NAME.log."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    seed = int(os.environ.get("KVLINK_TEST_SEED") or random.getrandbits(31))
    print(f"=== lane {name}: {LANES[name].command} (KVLINK_TEST_SEED={seed})", flush=True)
    began = time.monotonic()
    log = RESULTS / f"{name}.log"
    with log.open("w") as kept:
        process = subprocess.Popen(
            LANES[name].command.split(), cwd=ROOT, env={**os.environ, "KVLINK_TEST_SEED": str(seed)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            kept.write(line)
    status = process.wait()
    result: Result = {
        "lane": name,
        "status": status,
        **{kind: counts(log.read_text())[kind] for kind in ("passed", "failed", "skipped")},
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "ended": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }
    before = _known().get(name, {}).get("green")
    result["green"] = before if status else {"commit": result["commit"], "ended": result["ended"]}
    (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n")
    print(_closing(result), flush=True)
    return status == 0


def _closing(result: Result) -> str:
    minutes, seconds = divmod(result["seconds"], 60)
    return (
        f"lane {result['lane']:12} {'good' if result['status'] == 0 else 'FAILED':6} {result['passed']} passed, "
        f"{result['failed']} failed, {result['skipped']} skipped, seed {result['seed']}, {minutes} min {seconds:02} s, "
        f"at {result['commit']}, {result['ended']}"
    )


def newest(*tables: Iterable[Result]) -> dict[str, Result]:
    """Returns the last result of each lane, with its last green run, in the order of LANES."""
    found: dict[str, Result] = {}
    for result in (each for table in tables for each in table if each.get("lane") in LANES):
        other = found.get(result["lane"], result)
        last = max(other, result, key=lambda each: each["ended"])
        greens = [each["green"] for each in (other, result) if each["green"]]
        found[result["lane"]] = last | {"green": max(greens, key=lambda green: green["ended"], default=None)}
    return {name: found[name] for name in LANES if name in found}


def scores(*tables: Iterable[Result]) -> list[Result]:
    """Returns the newest mutation score of each module."""
    known = sorted((each for table in tables for each in table), key=lambda each: each["ended"])
    return [*{each["module"]: each for each in known}.values()]


def text_of(results: Iterable[Result]) -> str:
    """Returns the text of the record: a line for each lane, so that branches rarely conflict."""
    return "[\n" + ",\n".join(json.dumps(each) for each in results) + "\n]\n"


def _merged(*tables: Iterable[Result]) -> list[Result]:
    """Returns what the record keeps of these: lanes first, then scores."""
    each = [result for table in tables for result in table]
    return [*newest(each).values(), *scores(result for result in each if "module" in result)]


def _kept() -> list[Result]:
    """Returns the record together with what ended here."""
    record = ROOT / RECORD
    paths = [*sorted(RESULTS.glob("*.json")), *sorted(SCORES.glob("*.json"))]
    here = [json.loads(path.read_text()) for path in paths]
    return _merged(json.loads(record.read_text()) if record.exists() else [], here)


def _known() -> dict[str, Result]:
    return newest(_kept())


def changed_since(result: Result | None) -> list[str] | None:
    """Returns the files of a lane that have changed since its last green run. None if there is no such run."""
    if result is None or not result["green"]:
        return None
    try:
        paths = _git("diff", "--name-only", result["green"]["commit"].rstrip("+")).splitlines()
    except subprocess.CalledProcessError:
        return None  # the commit is of a branch that is gone
    paths += _git("ls-files", "--others", "--exclude-standard").splitlines()
    return [path for path in paths if result["lane"] in touched([path])]


def stale() -> list[tuple[str, str]]:
    """Returns each lane with changed sources and a line about it. The one that was green longest ago is first."""
    known, found = _known(), []
    for name in LANES:
        result = known.get(name)
        changed = changed_since(result)
        green = (result or {}).get("green")
        if changed is None:
            found.append(("", name, f"was never green: {LANES[name].command}"))
        elif changed and green:
            since = f"green at {green['commit']}, {green['ended']}; {len(changed)} of its files changed since"
            found.append((green["ended"], name, f"{since}: {LANES[name].command}"))
    return [(name, line) for _, name, line in sorted(found, key=lambda each: each[0])]


def show() -> None:
    """Prints a line for each lane, and another one if its last green run is not of the present sources."""
    known, old = _known(), dict(stale())
    for name, lane in LANES.items():
        print(_closing(known[name]) if name in known else f"lane {name:12} never ran: {lane.command}")
        if name in known and name in old:
            print(f"     {name:12} {old[name]}")
    for score in scores(each for each in _kept() if "module" in each):
        print(_score_line(score))


def _score_line(score: Result) -> str:
    low, high = score["interval"]
    of_kinds = ", ".join(f"{kind} {killed} of {tried}" for kind, (killed, tried) in score["kinds"].items())
    return (
        f"mutants of {score['module']:12} {score['score']:3} % killed ({low} to {high} %), "
        f"{score['survived']} survive, "
        f"{score['timeout']} time-outs, {score['equivalent']} equivalent, planted {score['planted'][0]} of "
        f"{score['planted'][1]}; {of_kinds}; at {score['commit']}, {score['ended']}"
    )


def record(message: str = "Record how lanes ended") -> None:
    """Writes the record and commits it alone."""
    (ROOT / RECORD).write_text(text_of(_kept()))
    _git("add", RECORD)
    if _git("status", "--porcelain", RECORD):
        _git("commit", "--quiet", "--only", "--message", message, RECORD)


def resolve() -> None:
    """Ends a conflict in the record."""
    sides = [json.loads(_git("show", f":{stage}:{RECORD}")) for stage in (2, 3)]
    (ROOT / RECORD).write_text(text_of(_merged(*sides)))
    _git("add", RECORD)


def _git(*command: str) -> str:
    return subprocess.run(
        ["git", *command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def _changed_paths(arguments: Sequence[str]) -> list[str]:
    if arguments:
        return _git("diff", "--name-only", *arguments).splitlines()
    bases = _git("branch", "--all", "--list", "origin/main", "--format=%(refname)").splitlines()
    base = _git("merge-base", "HEAD", bases[0]) if bases else "HEAD~1"
    new = _git("ls-files", "--others", "--exclude-standard").splitlines()
    return _git("diff", "--name-only", base).splitlines() + new


def _run_all(names: Iterable[str]) -> int:
    failed = [name for name in names if not run(name)]
    print(f"lanes that failed: {', '.join(failed)}" if failed else "all lanes are good")
    return len(failed) > 0


def main(arguments: Sequence[str]) -> int:
    """Carries out one of the commands above."""
    match arguments:
        case ["run", *names] if names and set(names) <= set(LANES):
            return _run_all(names)
        case ["verify"]:
            return _run_all(name for name, lane in LANES.items() if lane.tier == 2)
        case ["changed" | "names" as what, *given]:
            names = touched(_changed_paths(given))
            print("this change touches: " + (", ".join(names) or "no lane but the gate"))
            for name in names:
                if LANES[name].tier == 3:
                    print(f"by hand, since it takes long or special hardware: {LANES[name].command}")
            return 0 if what == "names" else _run_all(name for name in names if LANES[name].tier == 2)
        case ["show"]:
            show()
            return 0
        case ["stale"]:
            print("\n".join(f"{name:12} {line}" for name, line in stale()) or "no lane is stale")
            return 0
        case ["record"]:
            record()
            return 0
        case ["resolve"]:
            resolve()
            return 0
    print(f"{__doc__}\nlanes: {', '.join(LANES)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
