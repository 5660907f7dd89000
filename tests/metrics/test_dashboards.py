# SPDX-License-Identifier: Apache-2.0
"""Alert rules and dashboard ask for metrics that exist, the rules do what they say, and the page explains them all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from transports.pools import PoolSpec

from kvlink import Worker, WorkerConfig
from kvlink.control.rpc.call_counts import CallCounts
from kvlink.control.values import CoordinatorStatus, StoreHealth
from kvlink.errors import StaleBlocks
from kvlink.monitoring.metrics.coordinator import exposition
from kvlink.monitoring.metrics.worker import WorkerCollector
from kvlink.monitoring.worker_stats import WorkerStats
from kvlink.transfer.engine import Port

DEPLOY = Path(__file__).resolve().parents[2] / "integrations" / "deploy"
RULES = DEPLOY / "prometheus" / "kvlink.rules.yml"
DASHBOARD = DEPLOY / "grafana" / "kvlink.json"
DOCS = DEPLOY.parents[1] / "docs"
METRICS = (DOCS / "reference" / "metrics.md").read_text()
ALERTS = (DOCS / "operate" / "monitoring.md").read_text()

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool: .ci/system-packages python3 deploy (or apt-get install prometheus)"
)


class _Replayed:
    """A worker that has been closed, as it was with a coordinator, a NIC and a pull that never began."""

    def __init__(self, stats: WorkerStats) -> None:
        self._stats = stats

    def stats(self) -> WorkerStats:
        return self._stats


@pytest.fixture(scope="module")
def exposed() -> str:
    """A worker's and a coordinator's /metrics, with every metric that there can be."""
    from dataclasses import replace

    config = WorkerConfig(transports="loopback")
    with (
        Worker(PoolSpec().make(), "p", config=config) as owner,
        Worker(PoolSpec().make(), "d", config=config) as reader,
    ):
        reader.pull(owner.offer("good", [1]), [1]).wait(10)
        ticket = owner.offer("stale", [1])
        owner.abort("stale")
        with pytest.raises(StaleBlocks):
            reader.pull(ticket, [1]).wait(10)
        ports = (Port("mlx5_0:1", "was removed", times_away=1, held=False),)
        stats = replace(reader.stats(), joined=True, failed_starts={"PeerUnreachable": 1}, ports=ports)
    registry = CollectorRegistry()
    registry.register(WorkerCollector([_Replayed(stats)]))
    calls = CallCounts()
    calls.answered("Join", 1)
    calls.refused("Join", "FAILED")
    calls.certificate_expires_at = lambda: 1.8e9
    coordinators = exposition(CoordinatorStatus(), calls, StoreHealth()).decode()
    # Both have this one, and no process serves both.
    assert "kvlink_loop_restarts_total{" in coordinators
    shown = [line for line in coordinators.splitlines(keepends=True) if "kvlink_loop_restarts" not in line]
    return generate_latest(registry).decode() + "".join(shown)


@pytest.fixture(scope="module")
def exported(exposed: str) -> set[str]:
    """Names of the samples in it."""
    return set(re.findall(r"^(kvlink_\w+)[ {]", exposed, re.MULTILINE))


def asked(text: str) -> set[str]:
    """But for those in vLLM's own /metrics."""
    return set(re.findall(r"(?<!vllm:)\bkvlink_[a-z_]+", text))


def queries(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", ()))


def test_every_metric_that_is_asked_for_is_exported(exported: set[str]) -> None:
    expressions = "\n".join(queries(json.loads(DASHBOARD.read_text())["panels"]))
    assert asked(expressions), "the dashboard asks for something"
    assert asked(expressions) - exported == set()
    assert asked(RULES.read_text()) - exported == set()


def test_every_metric_of_vllm_that_is_asked_for_is_one_of_the_connector() -> None:
    """And so is every reason."""
    connector = DEPLOY.parent / "vllm"
    output = "\n".join(path.read_text() for path in connector.rglob("*.py"))
    rules = RULES.read_text()
    names = set(re.findall(r"vllm:kvlink_[a-z_]+", rules))
    assert len(names) >= 4
    assert names <= set(re.findall(r'"(vllm:kvlink_[a-z_]+)"', output))
    reasons = {
        reason
        for given in re.findall(r'reason=~"([a-z_|]+)"\}\[\d+m\]\)\) > 0', rules)
        for reason in given.split("|")
    }
    assert reasons
    assert reasons <= set(re.findall(r'"(\w+)"', output))


def test_the_reference_explains_every_metric_and_no_other(exported: set[str]) -> None:
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported}
    assert families == set(re.findall(r"^\| `(kvlink_[a-z_]+)", METRICS, re.MULTILINE))


def test_the_reference_explains_a_metric_as_its_help_does(exposed: str) -> None:
    helped = dict(re.findall(r"^# HELP (kvlink_\w+) (.*)$", exposed, re.MULTILINE))
    explained = re.findall(r"^\| `(kvlink_[a-z_]+)` \|[^|]*\| (.*) \|$", METRICS, re.MULTILINE)
    assert {name for name, text in explained if not text.startswith(helped[name])} == set()


def test_the_page_of_vllm_explains_a_metric_as_its_help_does() -> None:
    sources = (DEPLOY.parent / "vllm").rglob("*.py")
    source = "\n".join(path.read_text() for path in sources)
    helped = dict(re.findall(r'"(vllm:kvlink_\w+)",\s+(?:documentation=)?"(.*?)"', source))
    page = (DOCS / "servers" / "vllm-failures.md").read_text()
    rows = re.findall(r"^\| `(vllm:kvlink_[a-z_]+)[`{].*?\|[^|]*\| (.*) \|$", page, re.MULTILINE)
    explained = dict(rows)
    assert explained.keys() == helped.keys()
    assert {name for name, text in explained.items() if not text.startswith(helped[name])} == set()


def test_the_page_of_alerts_has_a_section_for_every_alert_and_no_other() -> None:
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    runbooks = re.findall(r'runbook: "docs/operate/monitoring\.md#(\w+)"', RULES.read_text())
    assert [alert.lower() for alert in alerts] == runbooks
    assert re.findall(r"^### (KVLink\w+)$", ALERTS, re.MULTILINE) == alerts


def test_the_dashboard_has_no_two_panels_in_one_place() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert all(x < 24 for x, _ in cells)
        places |= cells


def promtool(*arguments: str | Path, cwd: Path | None = None, stdin: str | None = None) -> str:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *map(str, arguments)], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_promtool
def test_promtool_takes_rules_and_configuration() -> None:
    assert "rules found" in promtool("check", "rules", RULES)
    promtool("check", "config", "scrape.yml", cwd=RULES.parent)


@needs_promtool
def test_alerts_fire_when_they_should(tmp_path: Path) -> None:
    cases = Path(__file__).with_name("kvlink.rules.test.yml").read_text()
    tests = tmp_path / "tests.yml"
    tests.write_text(cases.replace("[RULES]", f"[{RULES}]"))
    promtool("test", "rules", tests)


@needs_promtool
def test_promtool_takes_every_query_of_the_dashboard(tmp_path: Path) -> None:
    expressions = list(queries(json.loads(DASHBOARD.read_text())["panels"]))
    records = [
        {"record": f"panel:{index}", "expr": expr.replace("$__rate_interval", "1m").replace("$worker", ".*")}
        for index, expr in enumerate(expressions)
    ]
    rules = tmp_path / "panels.yml"
    rules.write_text(json.dumps({"groups": [{"name": "panels", "rules": records}]}))  # JSON is YAML
    assert f"{len(expressions)} rules found" in promtool("check", "rules", "--lint=none", rules)


@needs_promtool
def test_promtool_takes_the_exposition(exposed: str) -> None:
    promtool("check", "metrics", stdin=exposed)
