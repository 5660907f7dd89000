# SPDX-License-Identifier: Apache-2.0
"""Measures handoffs of vLLM's NixlConnector over kvlink's backend and over UCX, request by request in turn.

    python tests/nixl/backend_times.py [--rounds 10] [--json]

Servers that are not measured are stopped meanwhile. First token: prefill's answer, then decode's first token, as a
client behind a router waits for both. Decode: its part alone. Medians, in ms; `ratio` is that of the first tokens.
UCX has one thread a server instead of NixlConnector's four, which spin and take the cores of a small machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import PLUGINS
from connectors import PATIENT_LEASE_S, pair_of
from first_token import show
from handoff_times import BLOCK_TOKENS, MODEL, alone, first_token
from pair import Pair, eventually, prompt

BLOCKS = (1, 8, 16)
_COUNTED_S = 10.0
BACKENDS: Mapping[str, Mapping[str, Any]] = {
    "kvlink": {"env": {"NIXL_PLUGIN_DIR": str(PLUGINS)}, "backends": ["KVLINK"]},
    "ucx": {"num_threads": 1},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        pairs = {
            name: stack.enter_context(
                pair_of("NixlConnector", MODEL, "fail", lease_s=PATIENT_LEASE_S, **settings)
            )
            for name, settings in BACKENDS.items()
        }
        for name, pair in pairs.items():
            with alone(pair, list(pairs.values())):
                for turn in range(3):
                    taken(pair, prompt(f"warm up {name} {turn}", 300))
        for row in rows(pairs, options.rounds):
            show(row, as_json=options.json)
    return 0


def rows(pairs: Mapping[str, Pair], rounds: int) -> Iterator[dict[str, Any]]:
    """One of each length."""
    for blocks in BLOCKS:
        length = blocks * BLOCK_TOKENS + 1
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
        for turn in range(rounds):
            for name in pairs if turn % 2 else reversed(pairs):
                with alone(pairs[name], list(pairs.values())):
                    times[name].append(taken(pairs[name], prompt(f"round {turn} of {length}", length)))
        row: dict[str, Any] = {"tokens": length, "rounds": rounds}
        for name, each in times.items():
            whole, decode = (round(median(values), 1) for values in zip(*each, strict=True))
            row |= {f"{name}_first_token_ms": whole, f"{name}_decode_ms": decode}
        row["ratio"] = round(row["kvlink_first_token_ms"] / row["ucx_first_token_ms"], 2)
        yield row


def taken(pair: Pair, tokens: list[int]) -> tuple[float, float]:
    """The time to the first token, and decode's part of it. Raises AssertionError if its cache was not loaded."""
    loads, start = pair.loads(), time.perf_counter()
    handoff = pair.hand_off(tokens)
    prefill_ms = (time.perf_counter() - start) * 1e3
    decode_ms = first_token(pair, tokens, kv_transfer_params=handoff).ms
    assert eventually(lambda: pair.loads() == loads + 1, _COUNTED_S)
    return prefill_ms + decode_ms, decode_ms


if __name__ == "__main__":
    sys.exit(main())
