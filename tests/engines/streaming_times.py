# SPDX-License-Identifier: Apache-2.0
"""Measures handoffs in parts in vLLM: time to the first token behind two routers in turn, one that asks prefill
first and one that asks both sides at once, in front of the same two servers.

    python tests/engines/streaming_times.py [--rounds 7] [--transports tcp] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from connectors import pair_of
from pair import prompt, stream
from servers import router, running

LENGTHS = (300, 1024, 2048, 4000)
MODEL = "llama"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transports", default="", help="as KVLINK_TRANSPORTS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    extra = {"transports": options.transports, "streaming_from_tokens": 0}
    with (
        pair_of("KVLinkConnector", MODEL, "fail", coordinated=True, **extra) as pair,
        running(
            [router([pair.prefill], [pair.decode], *flags) for flags in ((), ("--streaming-from", "0"))]
        ) as routers,
    ):
        for server in routers:
            first_token_ms(server.url, "warm up", 300)
        for length in LENGTHS:
            times: list[list[float]] = [[], []]
            for turn in range(options.rounds):
                for way in (0, 1) if turn % 2 else (1, 0):
                    times[way].append(first_token_ms(routers[way].url, f"{length} {turn} {way}", length))
            row = {
                "tokens": length,
                "rounds": options.rounds,
                **{
                    f"{name}_{what}_ms": round(value(samples), 1)
                    for name, samples in zip(("afterwards", "meanwhile"), times, strict=True)
                    for what, value in (("p50", statistics.median), ("best", min))
                },
            }
            print(json.dumps(row) if options.json else row, flush=True)
        print("followed:", routers[1].metric("kvlink_router_followed_total"))
    return 0


def first_token_ms(url: str, name: str, num_tokens: int) -> float:
    """Returns the time to the first token of a prompt that no server has seen."""
    start = time.perf_counter()
    stream(url, MODEL, prompt(f"streaming times {name}", num_tokens), hang_up_after=1)
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    sys.exit(main())
