# SPDX-License-Identifier: Apache-2.0
"""The systemd unit and the workers' drop-in, as systemd reads them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from deploy import commands
from deploy.running import PATHS

from kvlink import WorkerConfig

_MOST_EXPOSED = 15
"""Tenths, of systemd's 0 to 10; 1.2 for what a network service cannot do without."""


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine: sudo apt-get install systemd")
    return subprocess.run(["systemd-analyze", "--no-pager", *arguments], capture_output=True, text=True)


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """With a program that is there."""
    path = tmp_path / commands.UNIT.name
    path.write_text(commands.UNIT.read_text().replace("/opt/kvlink/bin/kvlink", "/bin/true"))
    return path


def test_systemd_takes_the_unit(unit: Path) -> None:
    done = analyze("verify", str(unit))
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_gives_away_little(unit: Path) -> None:
    done = analyze("security", "--offline=yes", f"--threshold={_MOST_EXPOSED}", str(unit))
    assert done.returncode == 0, done.stdout


def test_systemd_takes_the_drop_in(tmp_path: Path) -> None:
    server = tmp_path / "server.service"
    server.write_text("[Service]\nExecStart=/bin/true\n")
    into = tmp_path / "server.service.d"
    into.mkdir()
    (into / "kvlink.conf").write_text(
        commands.DROP_IN.read_text().replace("/opt/vllm/bin/kvlink", "/bin/true")
    )
    done = analyze("verify", str(server))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_server_has_the_time_to_drain() -> None:
    asked = commands.parsed(commands.unit_drain())
    assert (asked["process"], asked["what"]) == (1, "")
    assert WorkerConfig().lease_s < asked["grace_s"]
    (limit_s,) = commands.unit_settings(commands.DROP_IN)["TimeoutStopSec"]
    assert asked["notice_s"] < asked["grace_s"] < int(limit_s)


def test_the_credentials_are_the_files_that_kvlink_certs_makes() -> None:
    settings = commands.unit_settings()
    loaded = dict(value.split(":", 1) for value in settings["LoadCredential"])
    assert loaded == {name: f"/etc/kvlink/certs/{name}" for name in PATHS.values()}
    (tls,) = [value for value in settings["Environment"] if "TLS" in value]
    assert dict(word.split("=") for word in tls.split()) == {
        name: f"%d/{file}" for name, file in PATHS.items()
    }
