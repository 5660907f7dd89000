# SPDX-License-Identifier: Apache-2.0
"""Shows the counts of the encoder connector in vLLM's log line ("EC Transfer metrics: …") and in its /metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats


class KVLinkEncoderStats(ECConnectorStats):  # type: ignore[misc]
    """The statistics. `data` has the counts by result."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Clears the statistics."""
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """Adds those of a later step."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values of the log line."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Returns whether nothing was counted."""
        return not self.data


class KVLinkEncoderMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus metrics, with labels for each engine of the process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._items = self._counter_cls(
            name="vllm:kvlink_encoder_items_total",
            documentation="Encoder outputs that were offered or pulled, by what became of them.",
            labelnames=[*labelnames, "result"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of `KVLinkEncoderStats.data`."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for result, count in transfer_stats_data.items():
            self._items.labels(*labels, result).inc(count)
