# SPDX-License-Identifier: Apache-2.0
"""What a hand-over costs in vLLM: kvlink's connector and NIXL's on like pairs of servers, request by request in turn.

    python tests/engines/handoff_times.py [--rounds 20] [--json]

The servers that are not measured are stopped meanwhile: those of NIXL spin while idle, and take the CPU from others.
Added: of decode's time to its first token with a hand-over, and of both servers' CPU time until then, what is more than
the median for the same prompts from decode's own prefix cache. Prompts are whole blocks and one token, so that both
compute one token. Of each cost: median and p99.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from connectors import pair_of
from pair import Pair, prompt

CONNECTORS = ("KVLinkConnector", "NixlConnector")
BLOCKS = (1, 4, 8, 16, 32)
BLOCK_TOKENS = 128
MODEL = "llama"
_PAUSE_S = 0.1  # what the request before left to do is done by then
_SUMS = {
    "KVLinkConnector": ("vllm:kvlink_transfer_seconds", "vllm:kvlink_post_seconds"),
    "NixlConnector": ("vllm:nixl_xfer_time_seconds", "vllm:nixl_post_time_seconds"),
}


class FirstToken(NamedTuple):
    """Of one answer: the time, and both servers' CPU time until then."""

    ms: float
    cpu_ms: float


class Sample(NamedTuple):
    """One hand-over, and the same from decode's cache. `transfer_ms` and `post_us`: as the connector itself says."""

    handed_over: FirstToken
    cached: FirstToken
    transfer_ms: float
    post_us: float


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
                    sample(pair, prompt(f"warm up {turn}", 300))
        for row in rows(pairs, options.rounds):
            print(json.dumps(row) if options.json else said(row), flush=True)
    return 0


def rows(pairs: Sequence[Pair], rounds: int) -> Iterator[dict[str, Any]]:
    """One of each length."""
    for blocks in BLOCKS:
        length = blocks * BLOCK_TOKENS + 1
        samples: dict[str, list[Sample]] = {pair.connector: [] for pair in pairs}
        for turn in range(rounds):
            tokens = prompt(f"round {turn} of {length}", length)
            for pair in pairs if turn % 2 else reversed(pairs):
                with alone(pair, pairs):
                    samples[pair.connector].append(sample(pair, tokens))
        row: dict[str, Any] = {"tokens": length, "rounds": rounds}
        for connector, taken in samples.items():
            name = connector.removesuffix("Connector").lower()
            for what, values in costs(taken).items():
                row[f"{name}_{what}"] = [round(quantile(values, share), 2) for share in (0.5, 0.99)]
        row["ratio"] = round(row["kvlink_added_ms"][0] / max(row["nixl_added_ms"][0], 1e-9), 2)
        yield row


def costs(taken: Sequence[Sample]) -> dict[str, list[float]]:
    """Beside the median of what was cached: single ones of NIXL's are hundreds of milliseconds off."""
    cached_ms, cached_cpu_ms = (
        quantile(values, 0.5) for values in zip(*(one.cached for one in taken), strict=True)
    )
    return {
        "added_ms": [one.handed_over.ms - cached_ms for one in taken],
        "transfer_ms": [one.transfer_ms for one in taken],
        "post_us": [one.post_us for one in taken],
        "cpu_ms": [one.handed_over.cpu_ms - cached_cpu_ms for one in taken],
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest that was measured: of fewer than a hundred, p99 is the worst."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


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


def sample(pair: Pair, tokens: list[int]) -> Sample:
    """One hand-over, and the same prompt once more from decode's own cache."""
    handoff = pair.hand_off(tokens)
    told = connector_s(pair)
    handed_over, cached = (
        first_token(pair, tokens, **extra) for extra in ({"kv_transfer_params": handoff}, {})
    )
    transfer, post = (after - before for before, after in zip(told, connector_s(pair), strict=True))
    return Sample(handed_over, cached, transfer * 1e3, post * 1e6)


def first_token(pair: Pair, tokens: list[int], **extra: Any) -> FirstToken:
    time.sleep(_PAUSE_S)
    cpu, start = cpu_ms(pair), time.perf_counter()
    answer = pair.ask(pair.decode, tokens, 1, **extra)
    took_ms = (time.perf_counter() - start) * 1e3
    assert answer.status == 200, answer.body
    return FirstToken(took_ms, cpu_ms(pair) - cpu)


def cpu_ms(pair: Pair) -> float:
    """That the servers' threads have had so far, by the scheduler's count of nanoseconds."""
    groups, total_ns = {pair.prefill.pid, pair.decode.pid}, 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(process.name)) in groups:
                total_ns += sum(int(one.read_text().split()[0]) for one in process.glob("task/*/schedstat"))
    return total_ns / 1e6


def connector_s(pair: Pair) -> tuple[float, float]:
    """Seconds of transfers and of posting, by the connector's own metrics since its start."""
    transfer, post = (pair.decode.metric(f"{name}_sum") for name in _SUMS[pair.connector])
    return transfer, post


def said(row: dict[str, Any]) -> str:
    return "  ".join(f"{name}={value}" for name, value in row.items())


if __name__ == "__main__":
    sys.exit(main())
