# SPDX-License-Identifier: Apache-2.0
"""Converts kvlink's counts to metric families of Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlink.runtime.durations import BOUNDS_S, Durations
from kvlink.runtime.supervised import failures

_F = TypeVar("_F", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily)

Labels = dict[str, str]


@dataclass(slots=True, eq=False)
class Families(Collector):
    """Collects metric families in the order of their first sample. Its `meaning` becomes the HELP text."""

    _families: dict[str, Metric] = field(default_factory=dict)

    def collect(self) -> Iterable[Metric]:
        """Returns the families."""
        return self._families.values()

    def count(self, name: str, meaning: str, value: float, labels: Labels) -> None:
        """Adds a sample of a counter. `name` ends in _total."""
        self._family(CounterMetricFamily, name, meaning, labels).add_metric(tuple(labels.values()), value)

    def gauge(self, name: str, meaning: str, value: float, labels: Labels) -> None:
        """Adds a sample of a gauge."""
        self._family(GaugeMetricFamily, name, meaning, labels).add_metric(tuple(labels.values()), value)

    def histogram(
        self, name: str, meaning: str, durations: Durations, labels: Labels, *, coarse: bool = False
    ) -> None:
        """Adds a histogram in seconds. `coarse` uses every second bound only, where there is one histogram per peer."""
        family = self._family(HistogramMetricFamily, name, meaning, labels)
        buckets = _cumulative(durations.buckets, 2 if coarse else 1)
        family.add_metric(tuple(labels.values()), buckets, durations.sum_ns / 1e9)

    def loops(self) -> None:
        """Adds the counts of this process's background loops."""
        survived = "Exceptions that ended one round of a background loop, which went on."
        for loop, number in failures().items():
            self.count("kvlink_loop_restarts_total", survived, number, {"loop": loop})

    def _family(self, kind: type[_F], name: str, meaning: str, labels: Labels) -> _F:
        family = self._families.get(name)
        if not isinstance(family, kind):
            family = self._families[name] = kind(name, meaning, labels=tuple(labels))
        return family


def _cumulative(buckets: Sequence[int], step: int) -> list[tuple[str, int]]:
    below = list(itertools.accumulate(buckets))
    bounded = [(f"{bound:.6g}", count) for bound, count in zip(BOUNDS_S, below, strict=False)]
    return [*bounded[step - 1 :: step], ("+Inf", below[-1])]
