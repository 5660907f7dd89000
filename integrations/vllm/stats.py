# SPDX-License-Identifier: Apache-2.0
"""Shows the connector's statistics in vLLM's log line ("KV Transfer metrics: …") and in its /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

_SECONDS = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
_BYTES = [float(1 << shift) for shift in range(12, 36, 2)]
_OPS = [1.0, 10.0, 100.0, 1e3, 1e4, 1e5, 1e6]

_HISTOGRAMS = {
    "transfer_s": (
        "vllm:kvlink_transfer_seconds",
        "Time to load a request, from the call until all of it was valid.",
        _SECONDS,
    ),
    "noticed_s": (
        "vllm:kvlink_load_noticed_seconds",
        "Time to load a request, from the call until vLLM was notified.",
        _SECONDS,
    ),
    "post_s": (
        "vllm:kvlink_post_seconds",
        "Time of the worker's main thread to start a load.",
        _SECONDS,
    ),
    "num_bytes": ("vllm:kvlink_transfer_bytes", "Bytes of a load.", _BYTES),
    "num_ops": ("vllm:kvlink_transfer_operations", "Reads of a load after merging.", _OPS),
}
_COUNTERS = {
    "transports": ("vllm:kvlink_transfers_total", "Loads by the transport that carried them.", "transport"),
    "failures": (
        "vllm:kvlink_failed_loads_total",
        "Loads that were refused or failed. None of their bytes was used.",
        "reason",
    ),
    "unused": (
        "vllm:kvlink_unused_handovers_total",
        "Handoffs that were refused, came without blocks, or were released unread.",
        "reason",
    ),
    "decisions": (
        "vllm:kvlink_streaming_total",
        "Requests that could stream, by when their pull began or why none of their prompt was announced.",
        "decision",
    ),
    "turns": (
        "vllm:kvlink_turns_total",
        "Answers that decode offered to later turns, and what became of those that a later turn came with.",
        "result",
    ),
    "guarded": (
        "vllm:kvlink_guarded_failures_total",
        "Unexpected exceptions that were kept inside one request, by what it was doing.",
        "kind",
    ),
}
_TOTALS = {
    "expired": (
        "vllm:kvlink_expired_leases_total",
        "Prefilled requests that no reader fetched within their lease.",
    ),
    "early_bytes": (
        "vllm:kvlink_early_bytes_total",
        "Bytes of loads in parts that had arrived before the last part was announced.",
    ),
}


_GAUGES = {
    "leases": (
        "vllm:kvlink_active_leases",
        "Requests under a lease that are computed for others or wait for their readers.",
    ),
    "oldest_lease_s": ("vllm:kvlink_oldest_lease_seconds", "Age of the oldest lease."),
}


class KVLinkStats(KVConnectorStats):  # type: ignore[misc]
    """The statistics. `data` is the result of RankStats.take, or an empty one with `unused` filled in."""

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not data:
            self.reset()

    @classmethod
    def of_scheduler(cls, **counts: Mapping[str, int]) -> KVLinkStats | None:
        """Returns the statistics of the scheduler's side, by the names of `data`, or None if nothing was counted."""
        if not any(counts.values()):
            return None
        stats = cls()
        stats.data |= {name: dict(counted) for name, counted in counts.items()}
        return stats

    def reset(self) -> None:
        """Clears the statistics."""
        self.data = {
            **{name: [] for name in _HISTOGRAMS},
            **{name: {} for name in _COUNTERS},
            **dict.fromkeys((*_TOTALS, *_GAUGES), 0),
        }

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Adds those of another rank or a later step. A gauge takes the larger value."""
        for name in _HISTOGRAMS:
            self.data[name].extend(other.data[name])
        for name in _COUNTERS:
            self.data[name] = dict(Counter(self.data[name]) + Counter(other.data[name]))
        for name in _TOTALS:
            self.data[name] += other.data[name]
        for name in _GAUGES:
            self.data[name] = max(self.data[name], other.data[name])
        return self

    def is_empty(self) -> bool:
        """Returns whether only gauges are set, which are not worth a line in the log."""
        return not any(self.data[name] for name in (*_HISTOGRAMS, *_COUNTERS, *_TOTALS))

    def reduce(self) -> dict[str, int | float | str]:
        """Returns the values of the log line."""
        data = self.data
        row: dict[str, int | float | str] = {"Loads": len(data["transfer_s"])}
        if data["transfer_s"]:
            times_ms, posts_us = np.array(data["transfer_s"]) * 1e3, np.array(data["post_s"]) * 1e6
            total = sum(data["num_bytes"])
            row |= {
                "p50 load (ms)": round(float(np.median(times_ms)), 3),
                "p99 load (ms)": round(float(np.percentile(times_ms, 99)), 3),
                "p50 post (us)": round(float(np.median(posts_us)), 1),
                "MiB per load": round(total / 2**20 / len(times_ms), 3),
                "GiB/s": round(total / 2**30 / max(float(times_ms.sum()) / 1e3, 1e-9), 3),
                "Paths": _listed(data["transports"]),
            }
        if data["failures"]:
            row["Failed loads"] = _listed(data["failures"])
        if data["unused"]:
            row["Unused handoffs"] = _listed(data["unused"])
        if data["decisions"]:
            row["Streaming"] = _listed(data["decisions"])
        if data["turns"]:
            row["Turns"] = _listed(data["turns"])
        if data["guarded"]:
            row["Unexpected errors"] = _listed(data["guarded"])
        row["Leases expired"] = data["expired"]
        return row


def _listed(counts: Mapping[str, int]) -> str:
    return " ".join(f"{name}:{count}" for name, count in sorted(counts.items()))


class KVLinkMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus metrics, with labels for each engine of the process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = list(labelnames)
        self._histograms = {
            key: self._histogram_cls(name=name, documentation=what, buckets=buckets, labelnames=names)
            for key, (name, what, buckets) in _HISTOGRAMS.items()
        }
        self._counters = {
            key: self._counter_cls(name=name, documentation=what, labelnames=[*names, label])
            for key, (name, what, label) in _COUNTERS.items()
        }
        self._totals = {
            key: self._counter_cls(name=name, documentation=what, labelnames=names)
            for key, (name, what) in _TOTALS.items()
        }
        self._gauges = {
            key: self._gauge_cls(name=name, documentation=what, labelnames=names)
            for key, (name, what) in _GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the values of `KVLinkStats.data`."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, histogram in self._histograms.items():
            for value in transfer_stats_data[key]:
                histogram.labels(*labels).observe(value)
        for key, counter in self._counters.items():
            for name, count in transfer_stats_data[key].items():
                counter.labels(*labels, name).inc(count)
        for key, counter in self._totals.items():
            counter.labels(*labels).inc(transfer_stats_data[key])
        for key, gauge in self._gauges.items():
            gauge.labels(*labels).set(transfer_stats_data[key])
