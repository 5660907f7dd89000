# SPDX-License-Identifier: Apache-2.0
"""Runs seeds of the simulation, as `make simulate SEEDS="7 100-200 random:50"` does."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from control_simulation.running import kinds_of_events, simulate


def seeds(given: Iterable[str]) -> Iterator[int]:
    """Yields the seeds of "7", "100-200" and "random:50"."""
    for word in given:
        kind, _, count = word.partition(":")
        first, _, last = word.partition("-")
        if kind == "random":
            chance = random.Random(os.environ.get("KVLINK_TEST_SEED"))
            yield from (chance.randrange(1 << 31) for _ in range(int(count)))
        else:
            yield from range(int(first), int(last or first) + 1)


def main(given: list[str]) -> int:
    """Prints what occurred, and a line for each seed that fails; for a single seed also what was logged last."""
    chosen = list(seeds(given or ["random:100"]))
    failed, virtual_s, began = 0, 0.0, time.process_time()
    occurred, peaks = Counter(dict.fromkeys(kinds_of_events(), 0)), Counter[str]()
    for seed in chosen:
        outcome = simulate(seed)
        virtual_s += outcome.virtual_s
        failed += bool(outcome.violations)
        occurred.update(outcome.world.ledger.done)
        peaks |= Counter(outcome.world.ledger.peaks)  # the larger of each
        if len(chosen) == 1:
            print(*outcome.world.lines.tail, *outcome.faults, f"trace {outcome.trace}", sep="\n")
        if outcome.violations:
            print(outcome, flush=True)
    for kind, count in sorted(occurred.items()):
        print(f"{count:9,} {kind}")
    print("most:", ", ".join(f"{most:,.1f} {what}" for what, most in sorted(peaks.items())))
    print("never occurred:", ", ".join(kind for kind, count in occurred.items() if not count) or "nothing")
    took = f"in {time.process_time() - began:.1f}s"
    print(f"{len(chosen) - failed} passed, {failed} failed, {virtual_s:,.0f} virtual seconds {took} of CPU")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
