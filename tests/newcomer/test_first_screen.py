# SPDX-License-Identifier: Apache-2.0
"""Somebody new follows README's first screen and the page Install literally, as root and as an ordinary user."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs.blocks import block
from newcomer.fresh_root import HOME, FreshRoot, cpu_build_of_torch

pytestmark = [pytest.mark.newcomer, pytest.mark.timeout(7_200)]
CHECKOUT = "/home/reader/kvlink"


@pytest.fixture(params=["root", "reader"])
def user(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FreshRoot]:
    machine = FreshRoot(tmp_path / "machine")
    machine.clone(CHECKOUT)
    yield machine
    machine.close()


def commands_of_readme() -> dict[str, str]:
    """Each command of the first block, by itself."""
    lines = (re.match(r"make (\w+)", line) for line in block("README.md", "make demo").splitlines())
    return {found[1]: found[0] for found in lines if found}


def test_make_demo_and_make_test(machine: FreshRoot, user: str) -> None:
    """The second one takes twenty minutes for each user: with KVLINK_TEST_WHOLE=1."""
    machine.run("apt-get update -qq && apt-get install -y -qq make", "root", network=True)
    commands = commands_of_readme()
    if user == "root":
        machine.run(f"chown -R root:root {CHECKOUT}", "root")
    else:
        first = machine.try_run(commands["demo"], user, CHECKOUT, network=True)
        assert first.returncode != 0
        (advice,) = re.findall(r"^  (sudo apt-get .*)$", first.stderr, re.MULTILINE)
        machine.run(advice.replace("sudo ", ""), "root", network=True, DEBIAN_FRONTEND="noninteractive")
    said = machine.run(commands["demo"], user, CHECKOUT, network=True)
    assert re.search(
        r"^OK: 640 tokens, each as in the single-process run, over 4 transports\.$", said, re.MULTILINE
    )
    megabytes = int(machine.run("du -sm .venv", user, CHECKOUT).split()[0])
    assert megabytes < 330, "README says 270 MB"
    if "KVLINK_TEST_WHOLE" in os.environ:
        shelf = cpu_build_of_torch(machine, f"{HOME[user]}/wheels")
        said = machine.run(commands["test"], user, CHECKOUT, network=True, **shelf)
        print(*re.findall(r"^.*\bpassed\b.*$|^\[  PASSED.*$", said, re.MULTILINE), sep="\n")


def test_install(machine: FreshRoot, user: str) -> None:
    packages = block("docs/getting-started/install.md", "apt-get update")
    machine.run(packages, "root", network=True, DEBIAN_FRONTEND="noninteractive")
    if user == "root":
        machine.run(f"chown -R root:root {CHECKOUT}", "root")
    for page in ("README.md", "docs/getting-started/install.md"):
        assert "0 fail" in machine.run(block(page, "python3 -m venv"), user, CHECKOUT, network=True)
