# SPDX-License-Identifier: Apache-2.0
"""Prints how long a request of transformers pauses while it moves: `python tests/engines/move_times.py [ROUNDS]`.

Two processes of this host move a request over tcp, copied before or pulled whole. The pause is the time from its last
token at the source to its first new token at the target. Beside it stand two decode steps, the pull of the rest, and
the two calls of the router: the bar for a request that was copied before. "computed again" is a request whose offer
ended before the target came.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integrations"))

from batching_peer import BatchingProcess, end_all

SIZES = (128, 1024, 4096)
NUM_NEW, COPIES = 200, 3
COPIED, AGAIN = "copied before", "computed again"
OPTIONS = {"num_blocks": 1024, "config": {"transports": "tcp"}}


def moved(source: BatchingProcess, target: BatchingProcess, num_tokens: int, how: str) -> tuple[float, ...]:
    """Returns pause, decode step, pull and the two calls, in seconds."""
    prompt = random.Random().choices(range(256), k=num_tokens)
    name = f"r{random.getrandbits(64)}"
    source.call("generate_on", prompt=prompt, request_id=name, max_new_tokens=NUM_NEW)
    source.call("wait_for_tokens", request_id=name, count=20)
    for _ in range(COPIES if how == COPIED else 0):
        target.call("fetch", prefix=source.call("share", source=name))
    handoff = source.call("move", request_id=name)
    if how == AGAIN:
        source.call("abort", handoff=handoff)
    target.call("submit", handoff=handoff, request_id=name, max_new_tokens=NUM_NEW, record_timestamps=True)
    before, after = source.call("times", request_id=name), target.call("times", request_id=name)
    steps = [*map(_difference, pairwise(before[1:])), *map(_difference, pairwise(after[1:]))]
    first = after[how != AGAIN]  # without, its time is that of the token that the source had sent
    pull_s = 0.0 if how == AGAIN else target.call("pull_s")
    return first - before[-1], statistics.median(steps), pull_s, _calls_s(source, target, handoff)


def _difference(times: tuple[float, float]) -> float:
    return times[1] - times[0]


def _calls_s(source: BatchingProcess, target: BatchingProcess, handoff: str) -> float:
    """Returns what the calls take that carry the handoff, without their work: both refuse it."""
    begun = time.perf_counter()
    for process in (source, target):
        try:
            process.call("submit", handoff=handoff, max_new_tokens=1)
        except RuntimeError:
            continue
        raise AssertionError("it was not refused")
    return time.perf_counter() - begun


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    source, target = (BatchingProcess(name, **OPTIONS) for name in ("source", "target"))
    print("| tokens | how | pause, ms | decode step | pull of the rest | two calls | bar |")
    print("|---|---|---|---|---|---|---|")
    for num_tokens in SIZES:
        for how in (COPIED, "pulled whole", AGAIN):
            rows = [moved(source, target, num_tokens, how) for _ in range(rounds)]
            pause, step, pull, calls = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
            bar = 2 * step + pull + calls
            cells = (pause, step, pull, calls, bar)
            print(
                f"| {num_tokens} | {how} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |",
                flush=True,
            )
    end_all(source, target)


if __name__ == "__main__":
    main()
