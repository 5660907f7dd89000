# SPDX-License-Identifier: Apache-2.0
"""The chart's workers are right: the pod by hand, the guide's chart of a server, and doctor on each node."""

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
from deploy.running import environment

from kvlink import WorkerConfig

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
