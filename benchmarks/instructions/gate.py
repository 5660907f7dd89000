# SPDX-License-Identifier: Apache-2.0
"""Compares instruction counts: `python -m kvlink.benchmarks.instructions.gate [--update]` exits with 1 on a change.

Callgrind counts within one function and its callees, so the same build gives the same count every time, also on a busy
machine. Compilers differ, so the baseline has an entry for each that it was made with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kvlink import _core
from kvlink.errors import ConfigError, KVLinkError

BASELINE = Path(__file__).with_name("baseline.json")
C_PROGRAM = Path("build/cpp/kvlink_cost")
"""tests/capi/cost.cc, which pulls through the interface for C and by the engine's own calls, in turn."""
MOST_ADDED = 1900
"""Instructions that a pull of one block from C may cost more than the engine's own: the ticket's parse and checks."""
TOLERANCE = 0.01
"""Library code that is called (malloc, memcpy) may differ a little between machines."""

_TIMEOUT_S = 300.0
_COMPILER = re.compile(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+")


class Case(NamedTuple):
    """One count, taken while within `function`, which each round of the work calls `calls` times."""

    work: str
    function: str
    rounds: int
    calls: int = 1
    in_c: bool = False
    """Whether C_PROGRAM does the work, and not work.py."""

    def command(self) -> list[str]:
        """Returns the program that is counted."""
        if self.in_c:
            return [str(C_PROGRAM), str(self.rounds), self.work]
        work = Path(__file__).with_name("work.py")
        return [sys.executable, str(work), str(_core.__file__), self.work, str(self.rounds)]


CASES = {
    "plan": Case("plan", "*Planner::plan(*", 8),
    "post": Case("post", "kvlink::time_posting(*", 2),
    "grant": Case("settle", "kvlink::LeaseTable::grant(*", 400),
    "settle": Case("settle", "kvlink::LeaseTable::settle(*", 400),
    "pull": Case("pull", "kvlink::Connection::pull(*", 400),
    "worker": Case("worker_pull", "*call_rounds(*", 400),
    "sweep": Case("sweep", "kvlink::LeaseTable::sweep(*", 8),
    "c plain": Case("plain", "kvl_pull_start", 8, 64, in_c=True),
    "c prepared": Case("prepared", "kvl_pull_start", 8, 64, in_c=True),
    "engine plain": Case("plain", "*Own::engine_pull(*", 8, 64, in_c=True),
    "engine prepared": Case("prepared", "*Own::engine_pull(*", 8, 64, in_c=True),
}


class Change(NamedTuple):
    """One count next to its baseline."""

    name: str
    counted: int
    baseline: int

    @property
    def ratio(self) -> float:
        """Returns the count divided by the baseline."""
        return self.counted / self.baseline

    @property
    def holds(self) -> bool:
        """Returns whether the count is within TOLERANCE. A lower one must update the baseline, or hides a loss."""
        return abs(self.ratio - 1) <= TOLERANCE


class GateError(KVLinkError):
    """A count could not be taken."""


def count(case: Case) -> int:
    """Returns the instructions of one round. Raises GateError."""
    command = [
        "valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", f"--toggle-collect={case.function}",
        *case.command(),
    ]  # fmt: skip
    if not shutil.which(command[0]):
        raise GateError("valgrind is not installed; run apt-get install valgrind")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not found:
        raise GateError(f"{' '.join(command)}:\n{done.stderr}")
    if not int(found[1]):
        raise GateError(f"{case.function} was never called; write its current name in csrc/ into gate.py")
    return round(int(found[1]) / (case.rounds * case.calls))


def added(counts: Mapping[str, int]) -> dict[str, int]:
    """Returns what a pull from C costs more than the engine's own call of the same pull."""
    return {name: counts[f"c {name}"] - counts[f"engine {name}"] for name in ("plain", "prepared")}


def compare(counts: Mapping[str, int], baseline: Mapping[str, int]) -> list[Change]:
    """Returns the changes. Raises ConfigError for a baseline of other cases."""
    if set(counts) != set(baseline):
        raise ConfigError(
            f"the baseline counts {sorted(baseline)}, not {sorted(counts)}; update it with --update"
        )
    return [Change(name, counted, baseline[name]) for name, counted in counts.items()]


def compiler() -> str:
    """Returns the compiler's name, as the extension module reports it."""
    found = _COMPILER.search(Path(str(_core.__file__)).read_bytes())
    return found[0].decode() if found else "unknown"


def main() -> int:
    """Counts, compares, and prints the changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="Write the counts into the baseline.")
    update = parser.parse_args().update
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        counts = dict(zip(CASES, threads.map(count, CASES.values()), strict=True))
    known: dict[str, dict[str, int]] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if update:
        known[compiler()] = counts
        BASELINE.write_text(json.dumps(known, indent=2) + "\n")
    if compiler() not in known:
        print(f"SKIPPED: no baseline for {compiler()}, only for {', '.join(known)}; make one with --update")
        return 0
    changes = compare(counts, known[compiler()])
    for change in changes:
        says = "" if change.holds else "  <- changed: fix it, or write it into the baseline with --update"
        print(
            f"{change.name:15} {change.counted:>12,} instructions, {change.ratio:.4f} of the baseline{says}"
        )
    more = added(counts)
    for name, instructions in more.items():
        says = "" if instructions <= MOST_ADDED else f"  <- more than {MOST_ADDED:,}: fix it"
        print(f"C adds {instructions:,} instructions to a {name} pull{says}")
    return 0 if all(change.holds for change in changes) and max(more.values()) <= MOST_ADDED else 1


if __name__ == "__main__":
    sys.exit(main())
