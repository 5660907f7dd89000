# SPDX-License-Identifier: Apache-2.0
"""Prints how long a stream pauses while it moves between two vLLM servers: `python tests/engines/stream_move_times.py`.

Both servers and kvlink's router run on this host. The pause is the longest time between two events that the client gets
after the drain. The bar is two decode steps, the tail's transfer, which is 0 because the target computes it, and one
round trip: a request for one token at the target, less one step. "computed again" is what a client waits for who asks
the other server for the rest, which has nothing of the prompt.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from pair import ask
from servers import Server, router, running
from streams import MODEL, Streamed, body_of, decoding, tell, two_servers

SIZES = (128, 1024, 4096)
NUM_NEW = 120


def moved(routed: Server, two: list[Server], num_tokens: int) -> tuple[float, float, float, float]:
    """Returns pause, decode step, round trip, and the time of a request that is computed again, in seconds."""
    tokens = random.Random().choices(range(512), k=num_tokens)
    streamed = Streamed()
    before = routed.metric("kvlink_router_moved_total")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(streamed.read, routed.url, "/v1/completions", body_of(tokens, NUM_NEW))
        assert streamed.begun.wait(60)
        source = decoding(routed, two)
        drained = time.perf_counter()
        tell(routed, "drain", source)
        reading.result()
    tell(routed, "resume", source)
    assert routed.metric("kvlink_router_moved_total") == before + 1
    target = two[1 - two.index(source)]
    gaps = [(after - at, after > drained) for at, after in pairwise(streamed.times)]
    step = statistics.median(gap for gap, _ in gaps)
    pause = max(gap for gap, is_after in gaps if is_after)
    short = _seconds_of(target, random.choices(range(512), k=3))
    return pause, step, max(short - step, 0.0), _seconds_of(target, random.choices(range(512), k=num_tokens))


def _seconds_of(server: Server, tokens: list[int]) -> float:
    begun = time.perf_counter()
    assert ask(server.url, MODEL, tokens, 1).status == 200
    return time.perf_counter() - begun


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with two_servers() as two, running([router(two, two, "--migrate")]) as (routed,):
        print("| tokens | pause, ms | decode step | round trip | bar | computed again |")
        print("|---|---|---|---|---|---|")
        for num_tokens in SIZES:
            rows = [moved(routed, two, num_tokens) for _ in range(rounds)]
            pause, step, trip, again = (1e3 * statistics.median(column) for column in zip(*rows, strict=True))
            cells = (pause, step, trip, 2 * step + trip, again)
            print(f"| {num_tokens} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
