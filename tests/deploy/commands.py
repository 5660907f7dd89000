# SPDX-License-Identifier: Apache-2.0
"""The command lines of kvlink that stand in files for operators, taken from there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import typer.main
import yaml

from kvlink.cli.commands import app
from kvlink.integrations.router.commands import drain

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "integrations" / "deploy"
EXAMPLES = ROOT / "docs" / "examples"
DOCS = ROOT / "docs" / "operate"
CHART = DEPLOY / "chart"
CONTAINERFILE = DEPLOY / "image" / "Containerfile"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
UNIT = DEPLOY / "systemd" / "kvlink-coordinator.service"
DROP_IN = DEPLOY / "systemd" / "kvlink-worker.conf"
DOCTOR = CHART / "files" / "doctor.sh"
WORKER_POD = DEPLOY / "kubernetes" / "worker-pod.yaml"
GUIDES = ("coordinator.md", "drain.md", "runbook.md", "monitoring.md", "security.md")


def parsed(arguments: list[str]) -> dict[str, Any]:
    """Parses `kvlink ARGUMENTS…` with kvlink's own parser. Raises click's UsageError."""
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    if rest[0] == "drain":  # as an entry point, it parses its options itself
        command = typer.main.get_command(drain.app)
        del rest[0]
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    with command.make_context("kvlink", rest) as context:
        return dict(context.params)


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def image_command(instruction: str) -> list[str]:
    """The JSON form: signals reach kvlink and no shell."""
    text = CONTAINERFILE.read_text().replace("\\\n", " ")
    (found,) = re.findall(rf"^{instruction}\b.*?(\[.*\])\s*$", text, re.MULTILINE)
    return json.loads(found)


def unit_settings(path: Path = UNIT) -> dict[str, list[str]]:
    settings: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def unit_command() -> list[str]:
    (line,) = unit_settings()["ExecStart"]
    (store,) = [value for value in unit_settings()["Environment"] if value.startswith("STORE=")]
    return shlex.split(line.replace("${STORE}", store.partition("=")[2]))[1:]


def pod_drain() -> list[str]:
    (server,) = yaml.safe_load(WORKER_POD.read_text())["spec"]["containers"]
    return list(server["lifecycle"]["preStop"]["exec"]["command"])[1:]


def unit_drain() -> list[str]:
    (line,) = unit_settings(DROP_IN)["ExecStop"]
    return shlex.split(line.replace("$MAINPID", "1"))[1:]


def coordinators() -> dict[str, list[str]]:
    """By the file that they stand in, without the word kvlink."""
    return {
        "image": image_command("CMD"),
        "compose": compose()["services"]["coordinator-0"]["command"],
        "unit": unit_command(),
    }


def others() -> dict[str, list[str]]:
    return {
        "the image's health check": image_command("HEALTHCHECK")[1:],
        "compose's certificates": compose()["services"]["certs"]["command"],
        "a worker pod's preStop hook": pod_drain(),
        "a worker unit's ExecStop": unit_drain(),
    }


def code_blocks(guide: str) -> list[list[str]]:
    """Each `kvlink …` of a guide's indented lines, without comments and what is not written out."""
    lines = re.findall(r"^    (?:\S+=\S+ )*kvlink (.*)$", (DOCS / guide).read_text(), re.MULTILINE)
    return [[word for word in shlex.split(line, comments=True) if word != "…"] for line in lines]
