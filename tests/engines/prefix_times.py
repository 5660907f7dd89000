# SPDX-License-Identifier: Apache-2.0
"""Measures the first token of prompts whose prefix another server has: pulled from it, beside computed.

    python tests/engines/prefix_times.py [--rounds 9] [--tokens 512,1536,3840] [--json]
    python tests/engines/prefix_times.py --trace conversation_trace.jsonl [--seconds 300] [--speed 2] [--rounds 2]

There are three servers: one that has the prefix, one that shares prefixes with it, and one without a connector. The
last two get the same prompts, each a prefix and 40 tokens more, in alternation, and their tokens are compared. Times
are medians with quartiles in milliseconds.

With --trace, two servers get requests of Mooncake's trace in turn, with and without "share_prefixes" in alternation:
those of the conversations that have several requests in its first --seconds. 128 random tokens stand for each 512 of
the trace, and each answer has one token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chats import MODEL, pool_flags
from first_token import PAUSE_S, Timed, show, spread, timed
from pair import Pair, eventually, prompt
from prefix_replays import LARGEST, replays
from servers import STEADY_MALLOC, Server, running, vllm
from sharing import WITHIN_S, computed, forget, published, results, sharing

_NUM_QUESTION = 40
_BLOCKS = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", default="512,1536,3840", help="lengths of the prefixes")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--speed", type=float, default=2)
    parser.add_argument("--json", action="store_true", help="JSON lines")
    options = parser.parse_args()
    if options.trace:
        found = replays(options.trace, options.seconds, options.speed, options.rounds)
    else:
        found = rows(options.rounds, [int(each) for each in options.tokens.split(",")])
    for row in found:
        show(row, as_json=options.json)
    return 0


def rows(rounds: int, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Yields a row for each length."""
    plain = vllm("plain-prefixes", MODEL, None, pool_flags(_BLOCKS, LARGEST), STEADY_MALLOC)
    with sharing(_BLOCKS, LARGEST) as pair, running([plain]) as (alone,):
        for turn in range(2):
            sample(pair, alone, f"warm up {turn}", 1024, turn)
        for length in lengths:
            before = {
                name: results(pair.decode, name)
                for name in ("loaded", "computed_is_faster", "directory_failed")
            }
            started, moved = computed(pair.decode), pair.decode.metric("vllm:kvlink_transfer_bytes_sum")
            taken = [sample(pair, alone, f"{length} {turn}", length, turn) for turn in range(rounds)]
            time.sleep(PAUSE_S)  # vLLM counts after the answer
            yield {
                "prefix": length,
                "rounds": rounds,
                **{name: int(results(pair.decode, name) - count) for name, count in before.items()},
                "computed_tokens": int(computed(pair.decode) - started) // rounds,
                "MiB": round(
                    (pair.decode.metric("vllm:kvlink_transfer_bytes_sum") - moved) / rounds / (1 << 20), 1
                ),
                "pulled": spread([one.first_ms for one, _ in taken]),
                "computed": spread([one.first_ms for _, one in taken]),
            }


def sample(pair: Pair, alone: Server, name: str, length: int, turn: int) -> tuple[Timed, Timed]:
    """Returns the answers of the server that shares, and of the plain one."""
    directory = pair.coordinators[0]
    time.sleep(PAUSE_S)  # the prefix of the request before is published a step after its answer
    forget(pair)
    prefix = prompt(f"prefix {name}", length)
    assert pair.ask(pair.prefill, [*prefix, *prompt(f"first {name}", _NUM_QUESTION)], 1).status == 200
    assert eventually(lambda: published(directory) == 1, WITHIN_S)
    tokens = [*prefix, *prompt(f"second {name}", _NUM_QUESTION)]
    answers: dict[Server, Timed] = {}
    for server in (pair.decode, alone) if turn % 2 else (alone, pair.decode):
        time.sleep(PAUSE_S)
        answers[server] = timed(server, MODEL, {"prompt": tokens})
    assert answers[pair.decode].tokens == answers[alone].tokens, name
    return answers[pair.decode], answers[alone]


if __name__ == "__main__":
    sys.exit(main())
