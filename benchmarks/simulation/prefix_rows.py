# SPDX-License-Identifier: Apache-2.0
"""Compares a fleet of prefill workers with and without pulls of prefixes from peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvlink.errors import ConfigError

from ..workloads.traces import Request
from .prefix_sharing import PrefillFleet, PrefixSharing, Served

Row = dict[str, Any]


def rows(fleet: PrefillFleet, requests: Sequence[Request], token_bytes: int, speed: float) -> Iterator[Row]:
    """Yields a row for each way to route, without and with pulls. Raises ConfigError."""
    if not any(request.prefixes for request in requests):
        raise ConfigError(
            "the trace does not say which prompts have prefixes in common (hash_ids); use Mooncake's, for example "
            "FAST25-release/traces/conversation_trace.jsonl of github.com/kvcache-ai/Mooncake"
        )
    lasts_s = (requests[-1].at_s - requests[0].at_s) / speed
    for by_prefix in (False, True):
        before: Row | None = None
        for peers in (False, True):
            served = PrefixSharing(fleet, by_prefix, peers).run(requests, speed)
            row = {
                "kind": "prefixes",
                "routed_by": "prefix" if by_prefix else "load",
                "pulls": peers,
                "workers": fleet.workers,
                "cache_tokens": fleet.cache_tokens,
                "prefill_tokens_per_s": fleet.rate.tokens_per_s,
                "speed": speed,
                **_measured(served, fleet, token_bytes, lasts_s),
            }
            row["computed_of_without"] = row["computed_tokens"] / (before or row)["computed_tokens"]
            row["p50_of_without"] = row["p50_s"] / (before or row)["p50_s"]
            row["p99_of_without"] = row["p99_s"] / (before or row)["p99_s"]
            before = before or row
            yield row


def _measured(served: Sequence[Served], fleet: PrefillFleet, token_bytes: int, lasts_s: float) -> Row:
    times = np.array([each.ttft_s for each in served])
    prompt, computed = sum(each.prompt for each in served), sum(each.computed for each in served)
    busy_s = sum(fleet.rate.predict_s(each.computed) for each in served)
    return {
        "requests": len(served),
        "prompt_tokens": prompt,
        "computed_tokens": computed,
        "computed": computed / prompt,
        "pulled": sum(each.pulled for each in served) / prompt,
        "moved_gib": sum(each.moved for each in served) * token_bytes / 2**30,
        "pulls_done": sum(each.pulled > 0 for each in served),
        "stale": sum(each.stale for each in served),
        "declined": sum(each.declined for each in served),
        "load": busy_s / (fleet.workers * lasts_s) if lasts_s else 0.0,
        "mean_s": float(times.mean()),
        "p50_s": float(np.percentile(times, 50)),
        "p99_s": float(np.percentile(times, 99)),
    }
