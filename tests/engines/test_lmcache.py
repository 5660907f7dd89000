# SPDX-License-Identifier: Apache-2.0
"""LMCache's own benchmark over kvlink's transfer channel and over NIXL's, and two of its servers with kvlink's.

`.ci/engines lmcache` makes the environment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from typing import Any

import pytest
from pair import eventually
from servers import ENGINES, ROOT, Launch, Server, free_port, running

BIN = ENGINES / "lmcache" / "bin"
OBJECTS = (
    "--page-size",
    "512KB",
    "--object-size",
    "8MB",
    "--num-objects",
    "16",
    "--num-source-objects",
    "48",
)
_COMMANDS = {"kvlink": "kvlink.integrations.lmcache", "nixl": "lmcache.cli.main"}
_MODULES = ("channel", "objects", "reads", "sockets")
_PATIENCE_S = 300.0

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (BIN / "pytest").exists(), reason="no LMCache: run .ci/engines lmcache"),
]


def lmcache(name: str, module: str, *arguments: str, port: int, alive: str = "") -> Launch:
    command = (str(BIN / "python"), "-m", module, *arguments)
    return Launch(name, command, port, {"LMCACHE_DISABLE_BANNER": "1"}, alive)


def test_its_interfaces_are_what_kvlink_takes_for_granted() -> None:
    """Runs the tests that the gate leaves out for want of LMCache."""
    tests = [f"tests/integrations/test_lmcache_{name}.py" for name in _MODULES]
    # -P: the kvlink that is installed, and not this checkout's.
    pytest_of_its_own = [str(BIN / "python"), "-P", "-m", "pytest"]
    command = [*pytest_of_its_own, "-q", "-p", "no:cacheprovider", "-o", "filterwarnings=default", *tests]
    env = os.environ | {"REQUIRE_LANES": "integrations"}  # of that run
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-10_000:] + ran.stderr[-3000:]
    assert "skipped" not in ran.stdout


@pytest.mark.parametrize("channel", _COMMANDS)
def test_its_benchmark_verifies_what_it_read(channel: str) -> None:
    """Every byte. NIXL's channel beside it says what the machine gives; with it both processes end by a fault."""
    url, control, port = (f"127.0.0.1:{free_port()}" for _ in range(3))
    benchmark = ("tool", "transfer-channel-benchmark", "--transfer-channel-type", channel, *OBJECTS)
    common = (*benchmark, "--url", url, "--control-url", control)
    source = lmcache(
        f"lmcache-{channel}", _COMMANDS[channel], *common, "--role", "server", "--buffer-size", "512MB",
        port=int(control.rpartition(":")[2]),
    )  # fmt: skip
    with running([source]) as (server,):
        reads = (str(BIN / "python"), "-m", _COMMANDS[channel], *common, "--role", "client", "--verify")
        ran = subprocess.run(
            [*reads, "--listen-url", port, "--iters", "10"],
            env=os.environ | dict(source.env), cwd=ENGINES, capture_output=True, text=True, check=False,
        )  # fmt: skip
        os.kill(server.pid, signal.SIGINT)  # as its user ends it
        assert eventually(lambda: server.num_logged("[server] shut down") == 1, _PATIENCE_S)
    assert "verify OK: 16 objects match" in ran.stdout, ran.stdout + ran.stderr[-3000:]
    median = re.search(r"median :.*", ran.stdout)
    print(f"{channel}: {median and median[0]}, exit status {ran.returncode}")
    if channel == "kvlink":
        assert ran.returncode == 0, ran.stderr[-3000:]
        assert server.num_logged("refused") == 0


def test_two_servers_find_each_other() -> None:
    """LMCache's coordinator tells them of each other; each opens a client of the other's channel, and a new one after
    the other was restarted."""
    coordinator_port = free_port()
    coordinator = lmcache(
        "lmcache-coordinator", "lmcache.cli.main", "coordinator", "--host", "127.0.0.1",
        "--port", str(coordinator_port), port=coordinator_port,
    )  # fmt: skip
    with running([coordinator]), running([_server(number, coordinator_port) for number in (1, 2)]) as servers:
        assert eventually(lambda: [_peers(each) for each in servers] == [1, 1], _PATIENCE_S), _ends(servers)
        servers[1] = servers[1].restarted().wait()
        assert eventually(lambda: [_peers(each) for each in servers] == [1, 1], _PATIENCE_S), _ends(servers)
        assert all(each.num_logged("kvlink worker") for each in servers)


def _server(number: int, coordinator_port: int) -> Launch:
    http = free_port()
    return lmcache(
        f"lmcache-{number}", "kvlink.integrations.lmcache", "server", "--instance-id", f"s{number}",
        "--host", "127.0.0.1", "--port", str(free_port()), "--http-port", str(http), "--disable-metrics",
        "--l1-size-gb", "0.25", "--eviction-policy", "LRU",
        "--p2p-transfer-engine", "kvlink", "--p2p-advertise-url", f"127.0.0.1:{free_port()}",
        "--coordinator-url", f"http://127.0.0.1:{coordinator_port}",
        "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-heartbeat-interval", "2",
        port=http,
    )  # fmt: skip


def _peers(server: Server) -> int:
    """Returns the number of peers that a server reads from."""
    with urllib.request.urlopen(f"{server.url}/status", timeout=30) as answer:
        return _found(json.load(answer), "p2p_peer_count")


def _found(tree: Any, name: str) -> int:
    if not isinstance(tree, dict):
        return 0
    return int(tree.get(name, 0)) or max((_found(each, name) for each in tree.values()), default=0)


def _ends(servers: list[Server]) -> str:
    return "\n".join(each.tail(10) for each in servers)
