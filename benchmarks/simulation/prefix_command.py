# SPDX-License-Identifier: Apache-2.0
"""Implements the command `kvlink bench prefixes`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlink.cli.tables import show_rows

from ..harness.options import ModelName

_LONG = frozenset({
    "kind", "workers", "cache_tokens", "prefill_tokens_per_s", "speed", "requests", "prompt_tokens", "computed_tokens",
    "mean_s", "p50_of_without", "p99_of_without", "computed_of_without",
})  # fmt: skip


def measure_prefixes(
    trace: Annotated[
        Path, typer.Option(help="Use this trace with hash_ids, such as Mooncake's conversation_trace.jsonl.")
    ],
    requests: Annotated[int, typer.Option(min=2, help="Take this many requests of the trace.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Simulate this many prefill workers.")] = 8,
    cache_tokens: Annotated[
        int, typer.Option(min=512, help="Let each worker's prefix cache have this many tokens.")
    ] = 400_000,
    prefill_tokens_per_s: Annotated[
        float, typer.Option(min=0.1, help="Let a worker compute this many tokens per second.")
    ] = 10_000.0,
    prefill_start_ms: Annotated[
        float, typer.Option(min=0, help="Add this time to each prefill, whatever its length.")
    ] = 0.0,
    speed: Annotated[
        float, typer.Option(min=0.001, help="Let requests arrive this many times as fast as in the trace.")
    ] = 1.0,
    margin: Annotated[
        float, typer.Option(min=1, help="Pull only if this many times the predicted time is still faster.")
    ] = 1.5,
    model: ModelName = "llama-3.1-8b",
    tp: Annotated[int, typer.Option(min=1, help="Use this many ranks per worker.")] = 1,
    path: Annotated[str, typer.Option(help="Pull over this path: gpudirect, bounce, or tcp.")] = "tcp",
    nics: Annotated[int, typer.Option(min=1, help="Use this many NICs per worker.")] = 1,
    gbps: Annotated[float, typer.Option(min=0.1, help="Use NICs of this many Gb/s.")] = 400.0,
    calibrate: Annotated[
        Path | None, typer.Option(help="Fit --path tcp to these results of `kvlink bench pull --json`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines and nothing else.")] = False,
) -> None:
    """Simulate prefill workers whose caches share prefixes: tokens computed, bytes moved, time to first token.

    Requests are routed by load and by prefix, each without and with pulls from peers. Nothing is measured here: times
    follow from --prefill-tokens-per-s and the path's cost model, and the result is always the same.
    """
    from kvlink.worker.prefix_choice import PrefillRate

    from ..workloads.models import model_of
    from ..workloads.traces import read_trace
    from .command import way_of
    from .prefix_rows import rows
    from .prefix_sharing import PrefillFleet
    from .workload import Move

    meant = model_of(model)
    move = Move(meant, tp, way_of(path, calibrate, meant, tp, nics, gbps))
    rate = PrefillRate(prefill_tokens_per_s, prefill_start_ms / 1e3)
    fleet = PrefillFleet(workers, cache_tokens, rate, cache(move.alone_s), margin)
    found = rows(fleet, read_trace(trace, requests), meant.token_bytes, speed)
    title = (
        f"{workers} workers that compute {prefill_tokens_per_s:g} tokens/s of {meant.name} at TP {tp}, with "
        f"{cache_tokens} tokens of cache, over {path}"
    )
    show_rows(found if as_json else map(brief, found), as_json, title)


def brief(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row that fits a screen."""
    return {name: value for name, value in row.items() if name not in _LONG}
