# SPDX-License-Identifier: Apache-2.0
"""kvlink accepts the commands of image, compose file, unit and guides, and a coordinator starts with them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from control.etcd_cluster import EtcdCluster, start_etcd
from deploy import commands
from deploy.running import PATHS, Running, environment, here, run

from kvlink.config import CATALOGUE

KNOWN = {setting.env for setting in CATALOGUE}
NOT_METRICS = {"kvlink_traceparent", "kvlink_"}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    etcd = start_etcd()
    yield etcd
    etcd.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as the compose file makes them."""
    folder = tmp_path_factory.mktemp("deploy") / "certs"
    made = run(
        [
            f"--dir={folder}" if word.startswith("--dir=") else word
            for word in commands.others()["compose's certificates"]
        ],
        environment(folder, {}),
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("where", [*commands.coordinators(), *commands.others()])
def test_kvlink_takes_the_command_line(where: str) -> None:
    assert commands.parsed((commands.coordinators() | commands.others())[where])


@pytest.mark.parametrize("guide", commands.GUIDES)
def test_kvlink_takes_the_command_lines_of_the_guides(guide: str) -> None:
    found = commands.code_blocks(guide)
    assert found
    for arguments in found:
        assert commands.parsed(arguments) is not None


@pytest.mark.parametrize("where", commands.coordinators())
def test_a_coordinator_starts_answers_and_ends(where: str, certificates: Path, etcd: EtcdCluster) -> None:
    arguments = commands.coordinators()[where]
    store = f"etcd://{etcd.addresses}/{where}" if where == "compose" else "memory"
    env = environment(certificates, dict.fromkeys(PATHS, ""))
    running = Running.start(here(arguments, store), env)
    healthy = commands.others()["the image's health check"]
    healthy = [running.address if word == "127.0.0.1:7400" else word for word in healthy]
    checked = run(healthy, env)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert json.loads(checked.stdout.splitlines()[0])["workers"] == 0
    with urllib.request.urlopen(f"{running.page}/metrics") as reply:
        assert b"kvlink_coordinator_uptime_seconds" in reply.read()
    running.process.send_signal(signal.SIGTERM)
    running.process.communicate(timeout=30)
    assert running.process.returncode == 0


def test_every_variable_in_the_files_is_an_option() -> None:
    for path in sorted(commands.DEPLOY.rglob("*")):
        if path.is_file() and path.suffix in (".yaml", ".service", ".conf", ".tpl", ".txt", ""):
            used = set(re.findall(r"\bKVLINK_[A-Z_]+", path.read_text())) - {"KVLINK_"}
            assert used <= KNOWN, path


@pytest.mark.parametrize("guide", sorted(path.name for path in commands.DOCS.glob("*.md")))
def test_guides_name_metrics_alerts_and_files_that_there_are(guide: str) -> None:
    text = (commands.DOCS / guide).read_text()
    rules = (commands.DEPLOY / "prometheus" / "kvlink.rules.yml").read_text()
    assert set(re.findall(r"\bKVLink[A-Z]\w+", text)) <= set(re.findall(r"alert: (\w+)", rules))
    listed = set(
        re.findall(
            r"^\| `(kvlink_\w+)` \|",
            (commands.ROOT / "docs" / "reference" / "metrics.md").read_text(),
            re.MULTILINE,
        )
    )
    exported = set(re.findall(r"(?<![\w:])kvlink_[a-z_]*[a-z]", text)) - NOT_METRICS
    assert exported <= listed
    for name in re.findall(r"`((?:integrations|kvlink|protos|tests)/[\w/.-]*)`", text):
        assert (commands.ROOT / name).exists(), name


def test_a_handoff_fits_into_the_time_to_stop() -> None:
    compose, unit = commands.compose()["services"]["coordinator-0"], commands.unit_settings()
    assert int(compose["stop_grace_period"].removesuffix("s")) >= 5
    assert float(unit["TimeoutStopSec"][0]) >= 5


def test_hadolint_finds_nothing_wrong_in_the_containerfile() -> None:
    """Versions come from constraints.txt, and Debian's are those of the base image's release."""
    pinned = ["--ignore=DL3008", "--ignore=DL3013"]
    done = subprocess.run(["hadolint", *pinned, str(commands.CONTAINERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_image_is_built_of_what_is_there() -> None:
    root = commands.DEPLOY.parents[1]
    text = commands.CONTAINERFILE.read_text()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        assert all((root / name).exists() for name in line.split()), line
    wanted = set(re.findall(r"^(?:USER|ENTRYPOINT|EXPOSE|STOPSIGNAL) .*$", text, re.MULTILINE))
    assert wanted == {"USER 7400:7400", 'ENTRYPOINT ["kvlink"]', "EXPOSE 7400 7480", "STOPSIGNAL SIGTERM"}
    assert "torch" not in text.partition("FROM")[2]
