# SPDX-License-Identifier: Apache-2.0
"""The chart: as text wherever tests run, rendered and started where there is a helm."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy import charts, commands
from deploy.running import Running, environment, here, run

from kvlink import __version__

TEMPLATES = "".join(path.read_text() for path in sorted((commands.CHART / "templates").iterdir()))
VALUES: dict[str, Any] = yaml.safe_load((commands.CHART / "values.yaml").read_text())
DEVELOPMENT: dict[str, Any] = yaml.safe_load((commands.CHART / "values-dev.yaml").read_text())
TENANTS = [{"tenant": "acme", "identity": "spiffe://example.org/ns/acme/*"}]
ALL = {
    "tenants": TENANTS,
    "store": {"fleet": "fleet-a"},
    "env": {"KVLINK_LOG": "debug"},
    "serviceMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True, "labels": {"release": "monitoring"}},
}


def _paths(values: dict[str, Any], prefix: str = "") -> set[str]:
    """Returns the paths of values that have no fields, or that are passed on as a whole."""
    whole = ("env", "resources", "nodeSelector", "affinity", "podAnnotations", "labels", "selector")
    found: set[str] = set()
    for key, value in values.items():
        deeper = isinstance(value, dict) and key not in whole
        found |= _paths(value, f"{prefix}{key}.") if deeper else {prefix + key}
    return found


def test_templates_use_the_values_that_there_are() -> None:
    assert set(re.findall(r"\.Values\.([\w.]+)", TEMPLATES)) == _paths(VALUES)


def test_templates_name_options_of_kvlink() -> None:
    taken = commands.parsed(["coordinator"]) | commands.parsed(["status"]) | commands.parsed(["drain"])
    options = {f"--{name.replace('_', '-')}" for name in taken} | {"--json"}
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEMPLATES))
    assert {"--store", "--lease-s", "--coordinator"} < found <= options


def test_the_values_for_development_set_values_that_there_are() -> None:
    assert _paths(DEVELOPMENT) <= _paths(VALUES)


def test_the_values_for_development_need_neither_etcd_nor_certificates(tmp_path: Path) -> None:
    documents = charts.render(tmp_path, DEVELOPMENT)
    assert set(documents) == {"StatefulSet", "Service"}
    container = _container(documents)
    assert {"--store=memory", "--insecure"} <= set(container["args"])


def test_the_chart_is_of_this_release() -> None:
    chart = yaml.safe_load((commands.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert commands.compose()["services"]["certs"]["image"] == f"kvlink:{__version__}"


def test_the_rules_are_those_of_prometheus() -> None:
    inside = commands.CHART / "files" / "kvlink.rules.yml"
    assert inside.read_text() == (commands.DEPLOY / "prometheus" / "kvlink.rules.yml").read_text()


def test_kubernetes_takes_the_etcd_of_the_guide_whose_settings_are_those_of_compose() -> None:
    documents = list(yaml.safe_load_all((commands.WORKER_POD.parent / "etcd.yaml").read_text()))
    for document in documents:
        charts.check(document)
    (etcd,) = [each for each in documents if each["kind"] == "StatefulSet"]
    (container,) = etcd["spec"]["template"]["spec"]["containers"]
    pod = {one["name"]: one.get("value") for one in container["env"]}
    compose = commands.compose()["services"]["etcd-0"]["environment"]
    assert set(pod) - {"ETCD_LISTEN_METRICS_URLS"} == set(compose)
    same = [name for name in compose if not re.search("NAME$|URLS$|FILE$|DIR$|CLUSTER$", name)]
    assert {name: pod[name] for name in same} == {name: compose[name] for name in same}
    assert pod["ETCD_CLIENT_CERT_ALLOWED_HOSTNAME"] == compose["ETCD_CLIENT_CERT_ALLOWED_HOSTNAME"]


def test_the_guides_values_name_the_guides_etcd_and_certificates(tmp_path: Path) -> None:
    page = (commands.DOCS / "kubernetes.md").read_text()
    (values,) = re.findall(r"^```yaml\n(# my-values.*?)^```", page, re.MULTILINE | re.DOTALL)
    container = _container(charts.render(tmp_path, yaml.safe_load(values)))
    (store,) = [each.partition("=")[2] for each in container["args"] if each.startswith("--store=")]
    members = store.removeprefix("etcd://").split(",")
    assert members == [f"etcd-{number}.etcd:2379" for number in range(3)]
    (hosts,) = re.findall(r"kvlink certs .*--host '(.*)'", page)
    assert {"kv-kvlink.serving.svc", "*.kv-kvlink.serving.svc"} <= set(hosts.split(","))
    assert {member.removesuffix(":2379") for member in members} <= set(hosts.split(","))
    secrets = re.findall(r"create secret generic (\S+)", page)
    assert {"kvlink-etcd", "kvlink-coordinator", "kvlink-worker", "kvlink-tickets"} == set(secrets)
    assert page.index("kubectl create namespace") < page.index("kubectl -n serving create secret")
    assert page.index("make image") < page.index("helm install")


def test_helm_finds_nothing_wrong() -> None:
    assert charts.findings() == []


def test_all_of_it_is_kubernetes(tmp_path: Path) -> None:
    some, every = charts.render(tmp_path, {}), charts.render(tmp_path, ALL)
    assert set(some) == {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert set(every) == {*some, "ConfigMap", "ServiceMonitor", "PrometheusRule"}
    rules = yaml.safe_load((commands.DEPLOY / "prometheus" / "kvlink.rules.yml").read_text())
    assert every["PrometheusRule"]["spec"] == rules
    assert every["PrometheusRule"]["metadata"]["labels"]["release"] == "monitoring"
    alone = charts.render(tmp_path, {"replicas": 1, "store": {"etcd": []}})
    assert set(alone) == {"StatefulSet", "Service", "NetworkPolicy"}
    assert "--store=memory" in _container(alone)["args"]


def test_names_fit_together(tmp_path: Path) -> None:
    every = charts.render(tmp_path, ALL)
    pod, service = every["StatefulSet"]["spec"], every["Service"]["spec"]
    assert pod["serviceName"] == every["Service"]["metadata"]["name"]
    labels = pod["template"]["metadata"]["labels"]
    selectors = [service["selector"], pod["selector"]["matchLabels"]]
    selectors += [
        every[kind]["spec"]["selector"]["matchLabels"] for kind in ("PodDisruptionBudget", "ServiceMonitor")
    ]
    selectors.append(every["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"])
    for selector in selectors:
        assert selector.items() <= labels.items()
    ports = {port["name"] for port in _container(every)["ports"]}
    assert {port["targetPort"] for port in service["ports"]} == ports
    assert {rule["ports"][0]["port"] for rule in every["NetworkPolicy"]["spec"]["ingress"]} == ports
    volumes = {volume["name"] for volume in pod["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in _container(every)["volumeMounts"]} == volumes
    assert pod["template"]["spec"]["terminationGracePeriodSeconds"] >= 5


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"store": {"etcd": []}}, "several coordinators share an etcd"),
        ({"certificates": {"secret": ""}}, "or set insecure: true"),
        ({"insecure": True}, "it excludes certificates.secret"),
    ],
)
def test_what_would_not_work_is_refused(tmp_path: Path, values: dict[str, Any], says: str) -> None:
    with pytest.raises(charts.NotRendered, match=says):
        charts.render(tmp_path, values)


def test_a_pod_starts_is_probed_and_ends(tmp_path: Path) -> None:
    container = _container(charts.render(tmp_path, ALL | {"replicas": 1, "store": {"etcd": []}}))
    assert run(["certs", f"--dir={tmp_path}"], environment(tmp_path, {})).returncode == 0
    tenants = tmp_path / "tenants.json"
    tenants.write_text(charts.render(tmp_path, ALL)["ConfigMap"]["data"]["tenants.json"])
    env = environment(tmp_path, {variable["name"]: variable["value"] for variable in container["env"]})
    arguments = [word.replace("/etc/kvlink/tenants.json", str(tenants)) for word in container["args"]]
    running = Running.start(here(arguments, "memory"), env)
    probe = container["startupProbe"]["exec"]["command"][1:]
    address = f"localhost:{running.address.rpartition(':')[2]}"
    probed = run([address if word == "localhost:7400" else word for word in probe], env)
    running.process.send_signal(signal.SIGTERM)
    output = running.process.communicate(timeout=30)[1]
    assert running.process.returncode == 0, output
    assert probed.returncode == 0, probed.stderr


def _container(rendered: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (container,) = rendered["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    return container
