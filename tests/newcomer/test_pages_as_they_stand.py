# SPDX-License-Identifier: Apache-2.0
"""Somebody new follows pages literally, with the released wheel and an index of packages and nothing else."""

from __future__ import annotations

import re

import pytest
from newcomer.machine import ROOT, Machine

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(1_800)]

MULTILINE_ALL = re.MULTILINE | re.DOTALL


def blocks(page: str, heading: str, language: str = "sh") -> list[str]:
    """Returns the code blocks of a section."""
    text = (ROOT / page).read_text()
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("newcomer"))


def test_the_readme(machine: Machine) -> None:
    (install,) = blocks("README.md", "Install")
    pip, doctor = install.splitlines()
    machine.run(pip)
    assert "0 fail" in machine.run(doctor).stdout
    (program,) = blocks("README.md", "Your own server", "python")
    (machine.home / "own.py").write_text(program)
    assert machine.run("python own.py").stdout.endswith("request-42 settled\n")
    (tried,) = blocks("README.md", "Try it", "console")
    line, *_, verdict = tried.splitlines()
    pip, demo = line.removeprefix("$ ").split(" && ")
    machine.run(pip)
    assert verdict.split(",")[1] in machine.run(demo).stdout


def test_the_quickstart(machine: Machine) -> None:
    (see,) = blocks("docs/getting-started/quickstart.md", "See it work")
    for line in see.splitlines():
        machine.run(line)
    (measure,) = blocks("docs/getting-started/quickstart.md", "Measure this machine")
    for line in measure.splitlines():
        assert "shm" in machine.run(line).stdout
    (two,) = blocks("docs/getting-started/quickstart.md", "Two processes")
    machine.give("docs/examples")
    assert "its blocks may be written again" in machine.run(two).stdout


def test_a_coordinator_on_a_host_without_containers(machine: Machine) -> None:
    page = "docs/operate/systemd.md"
    for block in blocks(page, "Install"):
        machine.run(block)
    make, *_ = blocks(page, "Certificates")
    machine.run(make)
    machine.give("integrations/deploy/systemd")
    copy = blocks(page, "A coordinator")[0].splitlines()[0]
    machine.run(copy)
    unit = (machine.home / "integrations/deploy/systemd/kvlink-coordinator.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit.replace("\\\n", ""), re.MULTILINE)
    lines = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    settings = [word.split("=", 1) for line in lines for word in line.split()]
    credentials = dict(re.findall(r"^LoadCredential=(\S+?):(\S+)$", unit, re.MULTILINE))
    env = {key: value.replace("%d", "/run/kvlink-credentials") for key, value in settings}
    load = "".join(f"cp {path} /run/kvlink-credentials/{name}\n" for name, path in credentials.items())
    check = blocks(page, "A coordinator")[-1]
    script = f"""
mount -t tmpfs credentials /run && mkdir /run/kvlink-credentials
{load}
({"; ".join(f"export {key}={value}" for key, value in env.items())}; exec {command}) > said &
until grep -q "kvlink coordinator on" said; do sleep 0.1; done
{check}
kill %1; wait %1"""
    assert "workers" in machine.run(script).stdout


def test_the_examples(machine: Machine) -> None:
    """The page says that they run as they are."""
    (named,) = re.findall(
        r"^\| \[.*?^$", (ROOT / "docs/getting-started/own-server.md").read_text(), MULTILINE_ALL
    )
    machine.give("docs/examples")
    machine.run("pip install 'kvlink[torch]'")
    for name in re.findall(r"\[(\w+\.py)\]", named):
        if name != "traffic.py":  # "until they are stopped"
            assert machine.run(f"python docs/examples/{name}").stdout


def test_monitoring(machine: Machine) -> None:
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    pip, serve, setting, top = re.findall(r"(?:^    .*\n)+", page, re.MULTILINE)[0].splitlines()
    machine.run(pip)
    url, *_ = re.findall(r"`(http://127.0.0.1:\d+/)` is then the status page", page)
    seen = machine.run(f"""
(exec {serve}
) &
{setting}
python - <<PROGRAM
import time, urllib.request
for _ in range(100):
    try:
        print(urllib.request.urlopen("{url}metrics").read().decode())
        break
    except OSError:
        time.sleep(0.1)
PROGRAM
{top.replace("10.0.0.5:7400", "127.0.0.1:7400").partition("#")[0]} --rounds 1
kill %1; wait %1""")
    assert "kvlink_coordinator_workers 0.0" in seen.stdout
