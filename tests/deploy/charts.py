# SPDX-License-Identifier: Apache-2.0
"""Helm's own library, and Kubernetes' schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import yaml
from deploy.commands import CHART

KUBERNETES = "1.33"
OPERATORS = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
"""Not Kubernetes' own: their schemas are the Prometheus operator's."""


class _Unique(yaml.SafeLoader):
    """Refuses a key that stands twice, as Kubernetes does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key stands twice among {keys}"
        return super().construct_mapping(node, deep)


class NotRendered(Exception):
    """The chart refuses its values, or is no chart."""


def render(folder: Path, values: dict[str, Any], chart: Path = CHART) -> dict[str, dict[str, Any]]:
    """Renders `chart` as the release kv in the namespace prod, checks the result, and returns it by kind.

    Raises NotRendered.
    """
    try:
        with helm_python.Chart.load(str(chart)) as loaded:
            texts = loaded.render(values, name="kv", namespace="prod", is_install=True)
    except helm_python.HelmError as error:
        raise NotRendered(str(error)) from None
    found = "\n---\n".join(text for name, text in texts.items() if not name.endswith("NOTES.txt"))
    documents = [document for document in yaml.load_all(found, _Unique) if document]
    for document in documents:
        check(document)
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def findings() -> list[Any]:
    """Returns what `helm lint --strict` says against the chart."""
    report = helm_python.lint(str(CHART), strict=True)
    return [message for message in report["messages"] if "icon is recommended" not in str(message)]


def check(document: dict[str, Any]) -> None:
    """Raises ValidationError for a field that Kubernetes does not know, or one of another type."""
    if document["kind"] not in OPERATORS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
