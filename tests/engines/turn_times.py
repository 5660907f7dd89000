# SPDX-License-Identifier: Apache-2.0
"""Measures what a later turn of a chat costs at prefill, with the ticket of the last answer and without.

    python tests/engines/turn_times.py [--rounds 3] [--answer 512] [--json]

Two chats of the same lengths on one pair of servers: one brings its tickets, the other does not. Both have in prefill's
prefix cache what prefill computed itself. Measured: the time of prefill's answer of one token, and the tokens that
prefill computed.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any, NamedTuple

from chats import bidirectional, computed
from pair import Pair, prompt

_TURNS = 4
_FIRST, _MORE = 300, 60
_BLOCKS = 200
_LARGEST = 4096


class Turn(NamedTuple):
    """One later turn at prefill."""

    tokens: int
    computed: int
    ms: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=512, help="tokens of each answer")
    parser.add_argument("--json", action="store_true", help="JSON lines")
    options = parser.parse_args()
    found: dict[bool, list[list[Turn]]] = {True: [], False: []}
    with bidirectional(_BLOCKS, largest=_LARGEST) as pair:
        for number in range(options.rounds):
            for tickets in (True, False):
                found[tickets].append(chat(pair, f"{number} {tickets}", options.answer, tickets))
    for turn in range(_TURNS - 1):
        row: dict[str, Any] = {"turn": turn + 2}
        for tickets, name in ((True, "with"), (False, "without")):
            turns = [one[turn] for one in found[tickets]]
            row["prompt"] = turns[0].tokens
            row[f"computed_{name}"] = turns[0].computed
            row[f"ms_{name}"] = round(median(one.ms for one in turns), 1)
        print(json.dumps(row) if options.json else " ".join(f"{key}={value}" for key, value in row.items()))
    return 0


def chat(pair: Pair, name: str, num_answer: int, tickets: bool) -> list[Turn]:
    """Has a chat, and returns its later turns."""
    tokens, ticket, output = prompt(name, _FIRST), None, []
    for turn in range(_TURNS):
        asked: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        if tickets and ticket:
            asked |= ticket
        before, began = computed(pair), time.perf_counter()
        answer = pair.ask(pair.prefill, tokens, 1, kv_transfer_params=asked)
        ms = (time.perf_counter() - began) * 1e3
        time.sleep(0.5)  # vLLM counts after the answer
        if turn:
            output.append(Turn(len(tokens), int(computed(pair) - before), ms))
        answered = pair.ask(pair.decode, tokens, num_answer, kv_transfer_params=answer.handoff)
        assert answered.tokens is not None, answered.body
        ticket = answered.handoff
        tokens = [*tokens, *answered.tokens, *prompt(f"{name}, {turn}", _MORE)]
    return output


if __name__ == "__main__":
    raise SystemExit(main())
