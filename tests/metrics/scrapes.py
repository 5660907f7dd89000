# SPDX-License-Identifier: Apache-2.0
"""Reads what Prometheus would."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def get(url: str) -> str:
    """Text of a page on loopback."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


class Scrape:
    """Samples of one exposition."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: list[Sample] = [
            sample for family in self.families.values() for sample in family.samples
        ]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of this name that have these labels, of which there is at least one."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"no sample {name} {labels}"
        return sum(found)

    def __contains__(self, name: str) -> bool:
        return any(sample.name == name for sample in self.samples)
