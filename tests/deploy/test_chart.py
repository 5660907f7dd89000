# SPDX-License-Identifier: Apache-2.0
"""The Helm chart: coordinators, routers and workers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy import charts, commands
from deploy.running import Running, environment, here, run

from kvlink import WorkerConfig, __version__

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


POD: dict[str, Any] = yaml.safe_load(commands.WORKER_POD.read_text())
(SERVER,) = POD["spec"]["containers"]
COORDINATORS = next(one["value"] for one in SERVER["env"] if one["name"] == "KVLINK_COORDINATOR")
DOCTOR = {"worker": {"doctor": {"enabled": True}}}


def test_kubernetes_takes_the_pod_by_hand() -> None:
    charts.check(POD)
    assert SERVER["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    ports = {f"KVLINK_{port['name'].removeprefix('kvlink-').upper()}": port for port in SERVER["ports"]}
    values = {variable["name"]: variable.get("value") for variable in SERVER["env"]}
    assert values["KVLINK_AGENT_PORT"] == str(ports["KVLINK_AGENT"]["containerPort"])
    assert values["KVLINK_PORT"] == str(ports["KVLINK_DATA"]["containerPort"])
    assert values["KVLINK_METRICS_PORT"] == str(ports["KVLINK_METRICS"]["containerPort"])


def test_the_pod_by_hand_has_the_templates_variables() -> None:
    template = (commands.CHART / "templates" / "_worker.tpl").read_text()
    named = re.findall(r"\{name: (KVLINK_\w+)", template)
    assert [one["name"] for one in SERVER["env"]] == [name for name in named if name != "KVLINK_INSECURE"]


def test_a_pod_has_the_time_to_drain() -> None:
    drain = yaml.safe_load((commands.CHART / "values.yaml").read_text())["worker"]["drain"]
    asked = commands.parsed(commands.pod_drain())
    assert (asked["process"], asked["notice_s"], asked["grace_s"]) == (
        1,
        drain["noticeSeconds"],
        drain["graceSeconds"],
    )
    assert drain["noticeSeconds"] < drain["graceSeconds"]
    assert drain["graceSeconds"] > WorkerConfig().lease_s, "an offer that nobody reads expires meanwhile"
    together = drain["graceSeconds"] + drain["serverSeconds"]
    assert POD["spec"]["terminationGracePeriodSeconds"] == together


def test_the_values_decide_how_a_pod_drains(tmp_path: Path, serving: Path) -> None:
    drain = {"noticeSeconds": 2, "graceSeconds": 90, "serverSeconds": 310}
    rendered = charts.render(tmp_path, {"kvlink": {"worker": {"drain": drain} | DOCTOR["worker"]}}, serving)
    spec = _pod(rendered["Deployment"])
    (server,) = spec["containers"]
    asked = commands.parsed(server["lifecycle"]["preStop"]["exec"]["command"][1:])
    assert (asked["notice_s"], asked["grace_s"]) == (2, 90)
    assert spec["terminationGracePeriodSeconds"] == 400
    assert _pod(rendered["DaemonSet"])["terminationGracePeriodSeconds"] == 5


@pytest.fixture
def serving(tmp_path: Path) -> Path:
    """The chart of an inference server that the guide shows, kvlink's in it."""
    guide = (commands.DOCS / "kubernetes.md").read_text()
    (example,) = re.findall(r"^```yaml\n# (templates/\S+)\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL)
    chart = tmp_path / "serving"
    (chart / "templates").mkdir(parents=True)
    (chart / example[0]).write_text(example[1])
    of_kvlink = yaml.safe_load((commands.CHART / "Chart.yaml").read_text())
    needs = [{"name": "kvlink", "version": of_kvlink["version"]}]
    own = {"apiVersion": "v2", "name": "serving", "version": "0.1.0", "dependencies": needs}
    (chart / "Chart.yaml").write_text(yaml.safe_dump(own))
    shutil.copytree(commands.CHART, chart / "charts" / "kvlink")
    return chart


def test_the_guides_chart_makes_the_pod_by_hand(tmp_path: Path, serving: Path) -> None:
    elsewhere = {"replicas": 0, "worker": {"coordinators": COORDINATORS.split(",")}}
    rendered = charts.render(tmp_path, {"kvlink": elsewhere}, serving)
    assert set(rendered) == {"Deployment"}
    assert rendered["Deployment"]["spec"]["template"]["spec"] == POD["spec"]
    beside = charts.render(tmp_path, {}, serving)
    assert set(beside) == {"Deployment", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    (server,) = beside["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert server["env"][0]["value"] == COORDINATORS.replace(".serving.", ".prod.")


@pytest.mark.parametrize(
    ("worker", "security", "limits"),
    [
        ({"rdma": {"hostPath": True}}, {"privileged": True}, {}),
        ({"rdma": {"ipcLock": False}}, {"capabilities": {"add": []}}, {"rdma/hca": 1}),
        ({"rdma": {"resource": "nvidia.com/roce"}}, SERVER["securityContext"], {"nvidia.com/roce": 1}),
    ],
)
def test_ways_to_rdma(
    tmp_path: Path, serving: Path, worker: dict[str, Any], security: dict[str, Any], limits: dict[str, int]
) -> None:
    spec = _pod(charts.render(tmp_path, {"kvlink": {"worker": worker}}, serving)["Deployment"])
    (server,) = spec["containers"]
    assert server["securityContext"] == security
    assert server["resources"]["limits"] == {"nvidia.com/gpu": 1, **limits}
    assert ("/dev/infiniband" in str(spec["volumes"])) == bool(security.get("privileged"))


def test_plaintext_any_ports_and_the_nodes_network(tmp_path: Path, serving: Path) -> None:
    worker = {"ports": {"agent": 0, "data": 0, "metrics": 0}, "hostNetwork": True}
    values = {"insecure": True, "certificates": {"secret": ""}, "worker": worker}
    spec = _pod(charts.render(tmp_path, {"kvlink": values}, serving)["Deployment"])
    (server,) = spec["containers"]
    assert (server["ports"], server["volumeMounts"], spec["volumes"]) == ([], [], [])
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    variables = {variable["name"]: variable.get("value") for variable in server["env"]}
    assert variables["KVLINK_INSECURE"] == "1"
    assert not [name for name in variables if "TLS" in name or "TICKET" in name]


def test_doctor_has_what_a_server_has(tmp_path: Path, serving: Path) -> None:
    kvlink = DOCTOR["worker"] | {"podMonitor": {"enabled": True, "namespaces": ["serving"]}}
    rendered = charts.render(tmp_path, {"kvlink": {"worker": kvlink}}, serving)
    server = _pod(rendered["Deployment"])
    doctor = _pod(rendered["DaemonSet"])
    (examined,), (serves,) = doctor["containers"], server["containers"]
    assert examined["env"] == serves["env"]
    assert serves["securityContext"].items() <= examined["securityContext"].items()
    assert serves["resources"]["limits"] == {"nvidia.com/gpu": 1} | examined["resources"]["limits"]
    assert [one for one in examined["volumeMounts"] if one["name"] != "tmp"] == serves["volumeMounts"]
    assert [one for one in doctor["volumes"] if one["name"] != "tmp"] == server["volumes"]
    assert "ports" not in examined
    labels = rendered["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert rendered["DaemonSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert not rendered["StatefulSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    monitor = rendered["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == POD["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in serves["ports"]}


def test_doctors_program_is_the_tested_one(tmp_path: Path) -> None:
    (doctor,) = _pod(charts.render(tmp_path, DOCTOR)["DaemonSet"])["containers"]
    assert doctor["command"][:2] == ["sh", "-c"]
    assert doctor["command"][2].strip() == commands.DOCTOR.read_text().strip()
    assert doctor["readinessProbe"]["exec"]["command"] == ["test", "-e", doctor["command"][4]]
    assert set(charts.render(tmp_path, DOCTOR | {"replicas": 0})) == {"DaemonSet"}


@pytest.mark.parametrize(
    ("host", "check", "ready"),
    [("127.0.0.1", "tcp", True), ("127.0.0.1", "no such check", False), ("192.0.2.1", "tcp", False)],
)
def test_a_node_is_ready_when_doctor_finds_it_so(tmp_path: Path, host: str, check: str, ready: bool) -> None:
    file = tmp_path / "ready"
    file.touch()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    looking = subprocess.Popen(
        ["sh", "-c", commands.DOCTOR.read_text(), "doctor", str(file), "60", "memfd", check],
        env=environment(tmp_path, {"PATH": path, "KVLINK_HOST": host}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert looking.stdout is not None
    output = []
    for line in looking.stdout:
        output.append(line.strip())
        if output[-1] in ("ready", "not ready"):
            break
    looking.send_signal(signal.SIGTERM)
    looking.communicate(timeout=30)
    assert looking.returncode == 0
    assert (output[-1] == "ready", file.exists()) == (ready, ready), output
    assert any(line.startswith("pass  memfd  ") for line in output)
    assert (f"does not pass: {check}" in output) == (check == "no such check")


def _pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]
