# SPDX-License-Identifier: Apache-2.0
"""The compose file: as it stands, and run without containers, with real etcd under TLS, load and restarts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from control.etcd_cluster import need_etcd
from deploy import commands
from deploy.composed import Composed
from waiting import eventually

SERVICES = commands.compose()["services"]
STORE = commands.parsed(SERVICES["coordinator-0"]["command"])["store"]

_SILENT = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def test_names_fit_together() -> None:
    members = {name for name in SERVICES if name.startswith("etcd")}
    assert {address.rpartition(":")[0] for address in STORE.removeprefix("etcd://").split(",")} == members
    certified = set(commands.parsed(SERVICES["certs"]["command"])["host"])
    assert certified == set(SERVICES) - {"certs", "prometheus", "grafana"}
    for name in members:
        environment = SERVICES[name]["environment"]
        assert environment["ETCD_NAME"] == name
        assert (
            f"{name}={environment['ETCD_INITIAL_ADVERTISE_PEER_URLS']}" in environment["ETCD_INITIAL_CLUSTER"]
        )
    mounted = {mount.partition(":")[0] for service in SERVICES.values() for mount in service["volumes"]}
    paths = {mount for mount in mounted if mount.startswith(".")}
    assert mounted - paths == set(commands.compose()["volumes"])
    assert all((commands.COMPOSE.parent / path).exists() for path in paths)


def test_a_demo_worker_has_the_time_to_drain() -> None:
    (grace_s,) = re.findall(
        r"^GRACE_S = (\S+)$", (commands.EXAMPLES / "traffic.py").read_text(), re.MULTILINE
    )
    for name in ("prefill-0", "decode-0"):
        assert float(grace_s) + 5.0 < float(SERVICES[name]["stop_grace_period"].removesuffix("s"))


def test_etcd_has_these_options() -> None:
    need_etcd()
    output = subprocess.run(["etcd", "--help"], capture_output=True, text=True)
    options = set(re.findall(r"--([a-z-]+)", output.stdout + output.stderr))
    used = {key.removeprefix("ETCD_").lower().replace("_", "-") for key in SERVICES["etcd-0"]["environment"]}
    assert used <= options


def test_compose_takes_the_file() -> None:
    readers = [["docker", "compose"], ["podman-compose"]]
    works = [of for of in readers if shutil.which(of[0]) and not subprocess.call([*of, "version"], **_SILENT)]
    if not works:
        pytest.skip("neither `docker compose` nor podman-compose on this machine: pip install podman-compose")
    command = [*works[0], "--file", str(commands.COMPOSE), "config"]
    read = subprocess.run(command, capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert set(yaml.safe_load(read.stdout)["services"]) == set(SERVICES)


@pytest.fixture
def composed(tmp_path: Path) -> Iterator[Composed]:
    composed = Composed(tmp_path)
    yield composed
    composed.close()


def say(client: subprocess.Popen[str], line: str) -> str:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(line)
    client.stdin.flush()
    return client.stdout.readline().strip()


@pytest.mark.netns
def test_it_runs_under_load_while_coordinators_restart_in_turn(composed: Composed) -> None:
    for _ in range(2):  # `docker compose up`, and again
        made = composed.run("certs")
        assert made.returncode == 0, made.stderr
    replicas = [name for name in SERVICES if name.startswith("coordinator")]
    for name in SERVICES:
        if name != "certs":
            composed.start(name)
    addresses = ",".join(f"{name}:7400" for name in replicas)
    etcd = STORE.removeprefix("etcd://")
    load = composed.inside([str(Path(__file__).with_name("load.py")), addresses, etcd], composed.worker())
    assert say(load, "") == "going", composed.log("coordinator-0") + composed.log("etcd-0")
    for name in replicas:
        assert composed.stop(name, signal.SIGTERM) == 0, composed.log(name)
        assert say(load, "on\n") == "going"
        composed.start(name)
        assert say(load, "on\n") == "going"
    last = say(load, "end\n")
    print(last)
    assert "handed off; etcd to a worker: etcd at" in last, last


@pytest.mark.netns
def test_the_demo_hands_off_and_prometheus_scrapes_everybody(composed: Composed) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus on this machine: sudo apt-get install prometheus")
    assert composed.run("certs").returncode == 0
    for name in SERVICES:
        if name not in ("certs", "grafana"):
            composed.start(name)

    def scraped(query: str) -> list[float]:
        try:
            reply = composed.get(f"http://prometheus:9090/api/v1/query?query={query}")
        except subprocess.CalledProcessError:
            return []
        return [float(row["value"][1]) for row in json.loads(reply)["data"]["result"]]

    eventually(lambda: scraped("up") == [1.0] * 4)
    eventually(lambda: sum(scraped("kvlink_settled_leases_total")) > 20)
    assert composed.stop("decode-0", signal.SIGTERM) == 0, composed.log("decode-0")
    said = composed.log("decode-0")
    (done,) = re.findall(r"decode-0 ends after (\d+) requests", said)
    assert int(done) > 20, said
    assert composed.stop("prefill-0", signal.SIGTERM) == 0, composed.log("prefill-0")
