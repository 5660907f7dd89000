# SPDX-License-Identifier: Apache-2.0
"""What a hand-over costs in vLLM: kvlink's connector and NIXL's on like pairs of servers, request by request in turn.

    python tests/engines/handoff_times.py [--rounds 20] [--json]

The servers that are not measured are stopped meanwhile: those of NIXL spin while idle, and take the CPU from others.
Added time: decode's time to its first token with a hand-over, less that of the same prompt from its own prefix cache.
Prompts are whole blocks and one token, so that both compute one token. Every answer is compared between the two.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from connectors import pair_of
from pair import Pair, prompt, stream

CONNECTORS = ("KVLinkConnector", "NixlConnector")
BLOCKS = (1, 4, 8, 16, 32)
BLOCK_TOKENS = 128
MODEL = "llama"
_SUMS = {
    "KVLinkConnector": ("vllm:kvlink_transfer_seconds", "vllm:kvlink_post_seconds"),
    "NixlConnector": ("vllm:nixl_xfer_time_seconds", "vllm:nixl_post_time_seconds"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        # "fail": a load that failed must not pass for a slow one.
        pairs = [stack.enter_context(pair_of(connector, MODEL, "fail")) for connector in CONNECTORS]
        for pair in pairs:
            with alone(pair, pairs):
                for turn in range(3):
                    added_ms(pair, prompt(f"warm up {turn}", 300))
        for row in rows(pairs, options.rounds):
            print(json.dumps(row) if options.json else said(row), flush=True)
    return 0


def rows(pairs: Sequence[Pair], rounds: int) -> Iterator[dict[str, Any]]:
    """One of each length."""
    for blocks in BLOCKS:
        length = blocks * BLOCK_TOKENS + 1
        added: dict[str, list[float]] = {pair.connector: [] for pair in pairs}
        own = {pair.connector: connector_s(pair) for pair in pairs}
        for turn in range(rounds):
            tokens = prompt(f"round {turn} of {length}", length)
            for pair in pairs if turn % 2 else reversed(pairs):
                with alone(pair, pairs):
                    added[pair.connector].append(added_ms(pair, tokens))
        row: dict[str, Any] = {"tokens": length, "rounds": rounds}
        for pair in pairs:
            name = pair.connector.removesuffix("Connector").lower()
            transfer_s, post_s = (
                (end - start) / rounds
                for start, end in zip(own[pair.connector], connector_s(pair), strict=True)
            )
            samples = sorted(added[pair.connector])
            row |= {
                f"{name}_added_p50_ms": round(statistics.median(samples), 2),
                f"{name}_added_p99_ms": round(samples[-1], 2),
                f"{name}_transfer_ms": round(transfer_s * 1e3, 3),
                f"{name}_post_us": round(post_s * 1e6, 1),
            }
        row["ratio"] = round(row["kvlink_added_p50_ms"] / max(row["nixl_added_p50_ms"], 1e-9), 2)
        yield row


@contextmanager
def alone(pair: Pair, pairs: Sequence[Pair]) -> Iterator[None]:
    """No other pair runs."""
    groups = [server.pid for other in pairs if other is not pair for server in (other.prefill, other.decode)]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        for group in groups:
            os.killpg(group, signal.SIGCONT)


def added_ms(pair: Pair, tokens: list[int]) -> float:
    """One hand-over, and the same prompt once more from decode's own cache."""
    with_handoff = first_token_ms(pair, tokens, kv_transfer_params=pair.hand_off(tokens))
    return with_handoff - first_token_ms(pair, tokens)


def first_token_ms(pair: Pair, tokens: list[int], **extra: Any) -> float:
    start = time.perf_counter()
    stream(pair.decode.url, pair.model, tokens, hang_up_after=1, **extra)
    return (time.perf_counter() - start) * 1e3


def connector_s(pair: Pair) -> tuple[float, float]:
    """Seconds of transfers and of posting, by the connector's own metrics since its start."""
    time.sleep(0.5)
    transfer, post = (pair.decode.metric(f"{name}_sum") for name in _SUMS[pair.connector])
    return transfer, post


def said(row: dict[str, Any]) -> str:
    return "  ".join(f"{name}={value}" for name, value in row.items())


if __name__ == "__main__":
    sys.exit(main())
