# SPDX-License-Identifier: Apache-2.0
"""Runs test lanes, remembers how they ended, and picks those that a change touches.

lanes.py run NAME...       runs lanes one after the other; build/lanes/NAME.json has how each ended
lanes.py verify            runs every lane of tier 2
lanes.py changed [RANGE]   runs the lanes of tier 2 that a change touches, and names those of tier 3 to run by hand
lanes.py names [RANGE]     only names them
lanes.py show              shows how each lane ended last, and at which commit

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
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "lanes"


class Lane(NamedTuple):
    """One command, and the tier that it belongs to."""

    command: str
    tier: int


LANES = {
    "transports": Lane("make test-transports", 2),
    "hostile": Lane("make test-hostile", 2),
    "processes": Lane("make test-processes", 2),
    "simulate": Lane("make simulate", 2),
    "netns": Lane("make test-netns", 2),
    "deploy": Lane("make test-deploy", 2),
    "pages": Lane("make test-pages", 2),
    "instructions": Lane("make test-instructions", 2),
    "sanitizers": Lane("make test-sanitizers", 2),
    "docs": Lane("make docs", 2),
    "pythons": Lane("make test-pythons", 2),
    "image": Lane("make image", 3),
    "rdma": Lane("make test-rdma", 3),
    "engines": Lane("make test-engines", 3),
    "gpu": Lane("pytest -m gpu", 3),
    "slow": Lane("make test-slow", 3),
    "soak": Lane("make soak", 3),
    "newcomer": Lane("make test-newcomer", 3),
    "release": Lane("make release-wheel", 3),
}

# The first row whose pattern begins a changed path tells its lanes. The gate is run for every change.
TOUCHED: Sequence[tuple[str, Iterable[str]]] = (
    (r"csrc/transports/verbs", ("transports", "sanitizers", "rdma")),
    (r"csrc/(transports/cuda|staging|device)", ("transports", "sanitizers", "gpu")),
    (
        r"csrc/transports/(cma|shm|same_host|tcp)",
        ("transports", "hostile", "sanitizers", "instructions", "soak"),
    ),
    (r"csrc/bindings", ("transports",)),
    (r"csrc/.*\.md$", ()),
    (r"csrc/|CMakeLists\.txt", ("transports", "sanitizers", "instructions", "soak")),
    (
        r"kvlink/control/(rpc|client|session)",
        ("transports", "processes", "simulate", "netns", "deploy", "docs"),
    ),
    (r"kvlink/(control|coordinator)/|protos/", ("processes", "simulate", "deploy", "docs")),
    (r"kvlink/monitoring/status_page/", ("processes", "pages", "docs")),
    (r"kvlink/(monitoring|cli|doctor)", ("processes", "deploy", "docs")),
    (r"kvlink/hardware/", ("transports", "docs", "gpu")),
    (r"kvlink/demo|kvlink/router|kvlink/tracing", ("processes", "docs")),
    (r"kvlink/", ("transports", "processes", "docs")),
    (r"integrations/deploy/image", ("deploy", "image")),
    (r"integrations/deploy", ("deploy",)),
    (r"integrations/", ("processes", "docs", "engines")),
    (r"benchmarks/instructions", ("instructions",)),
    (r"benchmarks/(peers|results)", ()),
    (r"benchmarks/report/", ("processes", "pages")),
    (r"benchmarks/", ("processes",)),
    (r"tests/transports/.*gpu", ("transports", "gpu")),
    (r"tests/transports/|tests/fake_cuda/", ("transports",)),
    (r"tests/hostile_peers/", ("hostile",)),
    (r"tests/netns/", ("netns",)),
    (r"tests/deploy/", ("deploy",)),
    (r"tests/pages/", ("pages",)),
    (r"tests/newcomer/|README\.md", ("newcomer",)),
    (r"docs/getting-started/|docs/operate/(monitoring|systemd)\.md", ("docs", "newcomer")),
    (r"tests/softroce/", ("rdma",)),
    (r"tests/engines/", ("engines",)),
    (r"tests/gpu/", ("gpu",)),
    (r"tests/cpp/", ("sanitizers",)),
    (r"tests/soak/", ("soak",)),
    (r"tests/pythons/|\.ci/pythons", ("pythons",)),
    (r"tests/control_simulation/", ("processes", "simulate")),
    (r"tests/(docs|smoke|unit|loops|transfer|worker|hardware|coordinator|cli|doctor)/|tests/[^/]*\.py$", ()),
    (r"tests/", ("processes",)),
    (r"pyproject\.toml|constraints\.txt|Makefile|\.ci/", ("processes", "deploy", "pythons", "image")),
    (r"docs/examples/", ("processes", "docs", "newcomer")),
    (r"docs/", ("docs",)),
    (r"[^/]*\.md$|LICENSE|NOTICE|\.git|\.clang-format", ()),
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
    result = {
        "lane": name,
        "status": status,
        **{kind: counts(log.read_text())[kind] for kind in ("passed", "failed", "skipped")},
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else ""),
        "ended": time.strftime("%Y-%m-%d %H:%M"),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n")
    print(_closing(result), flush=True)
    return status == 0


def _closing(result: dict[str, object]) -> str:
    minutes, seconds = divmod(int(str(result["seconds"])), 60)
    return (
        f"lane {result['lane']:12} {'good' if result['status'] == 0 else 'FAILED':6} {result['passed']} passed, "
        f"{result['failed']} failed, {result['skipped']} skipped, seed {result['seed']}, {minutes} min {seconds:02} s, "
        f"at {result['commit']}, {result['ended']}"
    )


def show() -> None:
    """Prints a line for each lane."""
    for name, lane in LANES.items():
        kept = RESULTS / f"{name}.json"
        print(
            _closing(json.loads(kept.read_text()))
            if kept.exists()
            else f"lane {name:12} never ran: {lane.command}"
        )


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
    print(f"{__doc__}\nlanes: {', '.join(LANES)}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
