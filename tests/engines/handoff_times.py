# SPDX-License-Identifier: Apache-2.0
"""Measures handoffs in vLLM: kvlink's connector and NIXL's on like pairs of servers, request by request in turn.

    python tests/engines/handoff_times.py [--rounds 20] [--json]

The servers that are not measured are stopped meanwhile: those of NIXL spin while idle, and take the CPU from others.
Added: of decode's time to its first token with a handoff, and of both servers' CPU time until then, what is more than
the median for the same prompts from decode's own prefix cache. Prompts are whole blocks and one token, so that both
compute one token. Steps: the time that decode's engine spends in the connector: to start the load; in each other step
that computes, all calls and of these to ask for results; in each that does not. Of each cost: median and p99.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from call_times import Step, steps
from connectors import pair_of
from pair import Pair, prompt

CONNECTORS = ("KVLinkConnector", "NixlConnector")
BLOCKS = (1, 4, 8, 16, 32)
BLOCK_TOKENS = 128
MODEL = "llama"
_PAUSE_S = 0.1  # what the request before left to do is done by then
_SUMS = {
    "KVLinkConnector": "vllm:kvlink_transfer_seconds_sum",
    "NixlConnector": "vllm:nixl_xfer_time_seconds_sum",
}


class FirstToken(NamedTuple):
    """Holds the time of one answer's first token, and both servers' CPU time until then."""

    ms: float
    cpu_ms: float


class Sample(NamedTuple):
    """One handoff, and the same from decode's cache. `transfer_ms`: as the connector itself says. `steps`: decode's
    during the handoff."""

    handed_off: FirstToken
    cached: FirstToken
    transfer_ms: float
    steps: list[Step]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pairs = [stack.enter_context(timed_pair(connector, folder)) for connector in CONNECTORS]
        for pair in pairs:
            with alone(pair, pairs):
                for turn in range(3):
                    sample(pair, prompt(f"warm up {turn}", 300), folder)
        for row in rows(pairs, options.rounds, folder):
            print(json.dumps(row) if options.json else sentence(row), flush=True)
    return 0


@contextmanager
def timed_pair(connector: str, folder: Path) -> Iterator[Pair]:
    """Its calls are written down in a folder of its name. "fail": a load that failed must not pass for a slow one."""
    (folder / connector).mkdir()
    with pair_of(connector, MODEL, "fail", call_times=folder / connector) as pair:
        yield pair


def rows(pairs: Sequence[Pair], rounds: int, folder: Path) -> Iterator[dict[str, Any]]:
    """One of each length."""
    for blocks in BLOCKS:
        length = blocks * BLOCK_TOKENS + 1
        samples: dict[str, list[Sample]] = {pair.connector: [] for pair in pairs}
        for turn in range(rounds):
            tokens = prompt(f"round {turn} of {length}", length)
            for pair in pairs if turn % 2 else reversed(pairs):
                with alone(pair, pairs):
                    samples[pair.connector].append(sample(pair, tokens, folder))
        row: dict[str, Any] = {"tokens": length, "rounds": rounds}
        for connector, taken in samples.items():
            name = connector.removesuffix("Connector").lower()
            for what, values in costs(taken).items():
                row[f"{name}_{what}"] = [round(quantile(values, share), 2) for share in (0.5, 0.99) if values]
        row["ratio"] = round(row["kvlink_added_ms"][0] / max(row["nixl_added_ms"][0], 1e-9), 2)
        yield row


def costs(taken: Sequence[Sample]) -> dict[str, list[float]]:
    """Beside the median of what was cached: single ones of NIXL's are hundreds of milliseconds off."""
    cached_ms, cached_cpu_ms = (
        quantile(values, 0.5) for values in zip(*(one.cached for one in taken), strict=True)
    )
    rest = [step for one in taken for step in others(one.steps)]
    return {
        "added_ms": [one.handed_off.ms - cached_ms for one in taken],
        "transfer_ms": [one.transfer_ms for one in taken],
        "start_us": [max(step.start_us for step in one.steps) for one in taken],
        "computing_step_us": [step.all_us for step in rest if step.computes],
        "results_us": [step.poll_us for step in rest if step.computes],
        "idle_step_us": [step.all_us for step in rest if not step.computes],
        "cpu_ms": [one.handed_off.cpu_ms - cached_cpu_ms for one in taken],
    }


def others(taken: Sequence[Step]) -> list[Step]:
    """But for the one that started the load."""
    starting = max(taken, key=lambda step: step.start_us)
    return [step for step in taken if step is not starting]


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


def sample(pair: Pair, tokens: list[int], folder: Path) -> Sample:
    """One handoff, and the same prompt once more from decode's own cache."""
    calls = folder / pair.connector / "decode"
    handoff = pair.hand_off(tokens)
    told_s, written = pair.decode.metric(_SUMS[pair.connector]), calls.stat().st_size
    handed_off = first_token(pair, tokens, kv_transfer_params=handoff)
    taken = steps(calls, written)
    cached = first_token(pair, tokens)
    transfer_s = pair.decode.metric(_SUMS[pair.connector]) - told_s
    return Sample(handed_off, cached, transfer_s * 1e3, taken)


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


def sentence(row: dict[str, Any]) -> str:
    return "  ".join(f"{name}={value}" for name, value in row.items())


if __name__ == "__main__":
    sys.exit(main())
