# SPDX-License-Identifier: Apache-2.0
"""Measures what vLLM's decode steps spend in kvlink's connector while many requests are in flight.

    python tests/engines/steps_in_flight.py [--requests 64] [--tokens 65]

All prompts are at prefill before decode is asked for all of them at once. Of steps that compute: the median and p99 of
all calls into the connector, and of those that start loads; and the same for steps that do not compute.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from call_times import Step, steps
from connectors import pair_of
from handoff_times import MODEL, quantile
from pair import Pair, prompt

_ANSWER_TOKENS = 32
_LEASE_S = 600  # prefill computes all prompts before decode asks for the first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=65)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with pair_of("KVLinkConnector", MODEL, "fail", lease_s=_LEASE_S, call_times=folder) as pair:
            handed_off(pair, "warm up", 2, options.tokens)
            for requests in (1, options.requests):
                calls = folder / "decode"
                written = calls.stat().st_size
                handed_off(pair, f"{requests} at once", requests, options.tokens)
                print(json.dumps({"requests": requests, **spent(steps(calls, written))}), flush=True)
    return 0


def handed_off(pair: Pair, name: str, requests: int, num_tokens: int) -> None:
    """Hands off so many prompts at once, and waits for the answers."""
    prompts = [prompt(f"{name} {number}", num_tokens) for number in range(requests)]
    handoffs = [pair.hand_off(tokens) for tokens in prompts]
    with ThreadPoolExecutor(requests) as threads:
        answers = [
            threads.submit(pair.ask, pair.decode, tokens, _ANSWER_TOKENS, kv_transfer_params=handoff)
            for tokens, handoff in zip(prompts, handoffs, strict=True)
        ]
        for answer in answers:
            assert answer.result().status == 200, answer.result().body


def spent(taken: Sequence[Step]) -> dict[str, list[float]]:
    """Microseconds by kind of step: their number, the median and p99."""
    kinds = {
        "computing_us": [step.all_us for step in taken if step.computes],
        "computing_start_us": [step.start_us for step in taken if step.computes],
        "idle_us": [step.all_us for step in taken if not step.computes],
    }
    return {
        name: [len(values), *(round(quantile(values, share), 1) for share in (0.5, 0.99) if values)]
        for name, values in kinds.items()
    }


if __name__ == "__main__":
    sys.exit(main())
