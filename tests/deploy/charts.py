# SPDX-License-Identifier: Apache-2.0
"""Helm, where there is one, and Kubernetes' schemas."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
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


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("helm") is None:
        pytest.skip("no helm on this machine: https://helm.sh/docs/intro/install")
    return subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60)


def render(folder: Path, values: dict[str, Any], chart: Path = CHART) -> dict[str, dict[str, Any]]:
    """Renders `chart` with `values`, checks the result, and returns it by kind."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm("template", "kv", str(chart), "--namespace", "prod", "--values", str(file))
    assert done.returncode == 0, done.stderr
    documents = [document for document in yaml.load_all(done.stdout, _Unique) if document]
    for document in documents:
        check(document)
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def check(document: dict[str, Any]) -> None:
    """Raises ValidationError for a field that Kubernetes does not know, or one of another type."""
    if document["kind"] not in OPERATORS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
