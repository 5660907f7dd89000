# SPDX-License-Identifier: Apache-2.0
"""The Containerfile's steps in a root of Debian, where no engine can build it and no base image can be had."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from deploy import commands
from newcomer.fresh_root import FreshRoot

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(3_600)]
_PYTHON = """
apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-dev python3-pip python3-venv iproute2
rm /usr/lib/python3*/EXTERNALLY-MANAGED
ln -s python3 /usr/bin/python"""
"""Stands for the image `python`."""


def steps() -> list[list[tuple[str, str]]]:
    """The instructions of each stage, and their arguments."""
    text = re.sub(r"^#.*\n", "", commands.CONTAINERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    stages: list[list[tuple[str, str]]] = []
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        elif stages:
            stages[-1].append((word, rest.strip()))
    return stages


def build(machine: FreshRoot, stage: list[tuple[str, str]], wheels: Path | None = None) -> None:
    machine.run(_PYTHON, "root", network=True, DEBIAN_FRONTEND="noninteractive")
    env: dict[str, str] = {}
    for word, rest in stage:
        if word == "ENV":
            env |= dict(each.split("=", 1) for each in shlex.split(rest))
        elif word == "COPY":
            *names, into = rest.split()
            machine.give(*names, into="/src", owner="root")
            assert into == "./" or names == [into]
        elif word == "RUN":
            if rest.startswith("--mount"):
                assert wheels is not None
                shutil.copytree(wheels, machine.take("/wheels"))
                rest = rest.partition(" ")[2]
            machine.run(rest, "root", "/src" if wheels is None else "/", network=True, **env)


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[tuple[FreshRoot, FreshRoot]]:
    machines = FreshRoot(tmp_path / "build"), FreshRoot(tmp_path / "image")
    yield machines
    for machine in machines:
        machine.close()


def test_its_steps_succeed_and_its_command_serves(stages: tuple[FreshRoot, FreshRoot]) -> None:
    builder, image = stages
    builder.run("mkdir /src", "root")
    first, second = steps()
    build(builder, first)
    build(image, second, builder.take("/wheels"))
    command = shlex.join(["kvlink", *commands.image_command("CMD"), "--insecure"])
    check = shlex.join(commands.image_command("HEALTHCHECK"))
    as_user = "setpriv --reuid 7400 --regid 7400 --clear-groups"
    said = image.run(
        f"""
{as_user} {command} >/tmp/said &
until grep -q "coordinator on" /tmp/said; do sleep 0.1; done
{as_user} {check}
kill %1; wait %1""",
        "root",
    )
    assert '"workers": 0' in said
    assert image.try_run("python -c 'import torch'", "root").returncode != 0
