# SPDX-License-Identifier: Apache-2.0
"""NIXL's own tests and example, as they are in its repository, over the backend.

KVLINK_NIXL_SOURCES is a checkout of NIXL: github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
from agents import environment

pytestmark = [
    pytest.mark.verify,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        "KVLINK_NIXL_SOURCES" not in os.environ, reason="set KVLINK_NIXL_SOURCES to a checkout of NIXL"
    ),
]

WRITES = {
    "test_get_xfer_telemetry_without_sink",
    "test_get_xfer_telemetry_with_buffer",
    "test_get_xfer_telemetry_cfg",
}
"""They post WRITE, which this release refuses."""


def sources(*parts: str) -> Path:
    return Path(os.environ["KVLINK_NIXL_SOURCES"]).joinpath(*parts)


def listens(port: int) -> bool:
    """Whether somebody listens there, as the kernel says: a connection might disturb him."""
    tables = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    return re.search(rf":{port:04X} 0+:0000 0A ", tables) is not None


def test_the_tests_of_its_python_api(tmp_path: Path) -> None:
    tests = sources("test", "python", "test_nixl_api.py")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider", "-q", "-rfE"]
    ran = subprocess.run(
        [*command, f"--rootdir={tests.parent}", str(tests), "--backend", "KVLINK"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    failed = {
        name.split("[")[0] for name in re.findall(r"^(?:FAILED|ERROR) \S+::(\S+)", ran.stdout, re.MULTILINE)
    }
    assert failed <= WRITES, ran.stdout
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed is not None, ran.stdout
    assert int(passed[1]) >= 18, ran.stdout


def test_its_example_of_two_peers_reads_until_it_writes() -> None:
    program = str(sources("examples", "python", "expanded_two_peers.py"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = [sys.executable, program, "--ip", "127.0.0.1", "--port", port, "--backend", "KVLINK"]
    target = subprocess.Popen([*common, "--mode", "target"], env=environment(), stderr=subprocess.DEVNULL)
    try:
        while not listens(int(port)):  # the initiator dials once
            assert target.poll() is None
            time.sleep(0.05)
        ran = subprocess.run(common, env=environment(), capture_output=True, text=True)
    finally:
        target.kill()
        target.wait()
    # Its handles for WRITE come before it posts anything.
    assert "Preparing WRITE handles failed" in ran.stderr + ran.stdout
    assert "refuses WRITE" in ran.stderr
