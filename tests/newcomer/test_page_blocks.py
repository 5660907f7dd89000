# SPDX-License-Identifier: Apache-2.0
"""Somebody new runs the blocks of all pages as they stand, from the released wheel, as root and as an ordinary user."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator

import pytest
from docs.blocks import RUNS, SERVED, block, blocks, how
from newcomer.fresh_root import HOME, ROOT, FreshRoot, cpu_build_of_torch

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(1_800)]
RUN_HERE = [each for each in blocks() if how(each) in (RUNS, SERVED)]
_ENDLESS = ("kvlink top",)
"""Lines that run until they are stopped; each gets three seconds."""


@pytest.fixture(scope="module", params=["root", "reader"])
def user(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def machine(user: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshRoot]:
    """With a virtual environment, and the files that pages name, but no checkout."""
    machine = FreshRoot(tmp_path_factory.mktemp("newcomer") / "machine")
    machine.run("apt-get update -qq && apt-get install -y -qq python3-venv iproute2", "root", network=True)
    machine.give("docs/examples", "integrations/deploy/systemd", into=HOME[user], owner=user)
    machine.run("python3 -m venv venv", user)
    yield machine
    machine.close()


@pytest.fixture(scope="module")
def wheel(machine: FreshRoot) -> str:
    """Where the wheel is that install.md lets stand for the dot of `pip install .`."""
    found = (ROOT / "dist" / "release").glob(f"*-cp311-*{platform.machine()}.whl")  # bookworm has Python 3.11
    wheels = sorted(found, key=lambda wheel: wheel.stat().st_mtime)
    if not wheels:
        pytest.skip("no wheel in dist/release: make release-wheel")
    return machine.put(wheels[-1], "/srv")


def with_wheel(text: str, wheel: str) -> str:
    return re.sub(r"pip install '?\.(\[[\w,]*\])?'?", rf"pip install '{wheel}\1'", text)


def lines_of(text: str) -> str:
    """The block, in which endless lines are stopped."""
    return "\n".join(
        f"timeout --signal=INT 3 {line.partition('#')[0]} >/dev/null || [ $? = 124 ]"
        if line.partition("#")[0].strip() in _ENDLESS
        else line
        for line in text.splitlines()
    )


@pytest.mark.parametrize(
    "each", RUN_HERE, ids=lambda each: f"{each.page}: {each.text.split(chr(10), 1)[0][:40]}"
)
def test_a_block_runs_as_it_stands(machine: FreshRoot, user: str, wheel: str, each: object) -> None:
    found = RUN_HERE[RUN_HERE.index(each)]  # type: ignore[arg-type]
    machine.run(f"pip install '{wheel}'", user, network=True)
    text = with_wheel(lines_of(found.text), wheel)
    if how(found) == SERVED:
        ready = "until grep -q coordinator said; do sleep 0.1; done"
        text = f"rm -f said\nkvlink coordinator >said &\n{ready}\n{text}\nkill %1"
    machine.run(text, user, network="pip install" in text)


def test_monitoring(machine: FreshRoot, user: str, wheel: str) -> None:
    page = (ROOT / "docs/operate/monitoring.md").read_text()
    pip, serve, setting, top = block("docs/operate/monitoring.md", "pip install '.[metrics]'").splitlines()
    machine.run(with_wheel(pip, wheel), user, network=True)
    url, *_ = re.findall(r"`(http://127.0.0.1:\d+/)` is then the status page", page)
    seen = machine.run(
        f"""
rm -f said
(exec {serve}
) >said &
{setting}
until grep -q "coordinator on" said; do sleep 0.1; done
python -c 'import urllib.request as u; print(u.urlopen("{url}metrics").read().decode())'
{top.replace("10.0.0.5:7400", "127.0.0.1:7400").partition("#")[0]} --rounds 1
kill %1; wait %1""",
        user,
    )
    assert "kvlink_coordinator_workers 0.0" in seen


def test_torch_and_the_examples(machine: FreshRoot, user: str, wheel: str) -> None:
    """Where this machine has a CPU build of torch, as install.md says; otherwise with the 5 GB of the default."""
    shelf = cpu_build_of_torch(machine, f"{HOME[user]}/wheels")
    install = block("docs/getting-started/install.md", "export PIP_FIND_LINKS")
    machine.run(with_wheel(install, wheel), user, network=True)
    (named,) = re.findall(
        r"^\| \[.*?^$", (ROOT / "docs/getting-started/own-server.md").read_text(), re.MULTILINE | re.DOTALL
    )
    for name in re.findall(r"\[(\w+\.py)\]", named):
        if name != "traffic.py":  # runs until it is stopped
            assert machine.run(f"python docs/examples/{name}", user)
    demo = with_wheel(block("docs/servers/transformers.md", "pip install '.[demo]'"), wheel)
    assert "continuous batching" in machine.run(demo, user, network=True, **shelf)


def test_a_coordinator_on_a_host_without_containers(machine: FreshRoot, user: str, wheel: str) -> None:
    if user != "root":
        pytest.skip("the page is for root")
    page = "docs/operate/systemd.md"
    machine.run(with_wheel(block(page, "python3 -m venv"), wheel), user, network=True)
    machine.run(block(page, "/opt/kvlink/bin/kvlink certs"), user)
    machine.run(f"mkdir -p /etc/systemd/system && {block(page, 'cp integrations').splitlines()[0]}", user)
    unit = (ROOT / "integrations/deploy/systemd/kvlink-coordinator.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit.replace("\\\n", ""), re.MULTILINE)
    lines = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    settings = [word.split("=", 1) for line in lines for word in line.split()]
    credentials = dict(re.findall(r"^LoadCredential=(\S+?):(\S+)$", unit, re.MULTILINE))
    exported = "; ".join(f"export {name}={value.replace('%d', '/run/given')}" for name, value in settings)
    load = "\n".join(f"cp {path} /run/given/{name}" for name, path in credentials.items())
    said = machine.run(
        f"""
mkdir /run/given
{load}
rm -f said
({exported}; exec {command}) >said &
until grep -q "kvlink coordinator on" said; do sleep 0.1; done
{block(page, "KVLINK_TLS_CA")}
kill %1; wait %1""",
        user,
    )
    assert "workers" in said
