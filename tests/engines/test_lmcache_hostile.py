# SPDX-License-Identifier: Apache-2.0
"""LMCache's servers with kvlink's channel live through messages and peers that are not what they should be.

Objects are stored and loaded by `lmcache_objects`, through LMCache's own lookups, adapters and memory.
`.ci/engines lmcache` makes the environment.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pair import eventually
from servers import ENGINES, Launch, Server, free_port, post, running
from test_lmcache import BIN, _peers, lmcache

HERE = Path(__file__).parent
SIZE = 1 << 20
_PATIENCE_S = 300.0
_LOAD_TIMEOUT_S = 6

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (BIN / "pytest").exists(), reason="no LMCache: run .ci/engines lmcache"),
]


class Node:
    """One of LMCache's servers. `p2p` is its address for reads, "" if it has none."""

    def __init__(self, name: str, coordinator: int, *flags: str, with_p2p: bool = True) -> None:
        self.name, self.objects, self.mq = name, free_port(), free_port()
        self.p2p = f"127.0.0.1:{free_port()}" if with_p2p else ""
        module = {"module_path": "lmcache_objects", "config": {"port": self.objects}}
        http = free_port()
        p2p = (
            "--p2p-transfer-engine", "kvlink", "--p2p-advertise-url", self.p2p,
            "--p2p-load-timeout", str(_LOAD_TIMEOUT_S),
            "--coordinator-url", f"http://127.0.0.1:{coordinator}",
            "--coordinator-advertise-ip", "127.0.0.1", "--coordinator-heartbeat-interval", "1",
        )  # fmt: skip
        made = lmcache(
            f"lmcache-{name}", "kvlink.integrations.lmcache", "server", "--instance-id", name,
            "--host", "127.0.0.1", "--port", str(self.mq), "--http-port", str(http), "--disable-metrics",
            "--l1-size-gb", "0.1", "--no-l1-use-lazy", "--eviction-policy", "LRU",
            "--server-module", json.dumps(module), *(p2p if with_p2p else ()), *flags,
            port=http,
        )  # fmt: skip
        env = {**made.env, "PYTHONPATH": str(HERE), "KVLINK_LOG": "info"}
        self.launch = Launch(made.name, made.command, made.port, env, made.alive)
        self.servers: list[Server] = []
        """The running one is the last."""

    def do(self, **command: Any) -> Any:
        status, answer = post(f"http://127.0.0.1:{self.objects}", command)
        assert status == 200, answer
        return answer["answer"]

    def store(self, *numbers: int, **more: Any) -> None:
        assert self.do(do="store", numbers=numbers, size=SIZE, **more) == [True] * len(numbers)

    def load(self, *numbers: int, **more: Any) -> list[list[int] | None]:
        return self.do(do="load", numbers=numbers, size=SIZE, **more)

    def logged(self, words: str) -> int:
        return self.server.num_logged(words)

    @property
    def server(self) -> Server:
        return self.servers[-1]


class Fleet:
    """A coordinator, an owner, a reader, and a server that only looks objects up, in whose name other peers answer."""

    def __init__(self, coordinator: int) -> None:
        self.coordinator = coordinator
        self.owner, self.reader = Node("owner", coordinator), Node("reader", coordinator)
        self.index = Node("index", coordinator, with_p2p=False)
        self.nodes = [self.owner, self.reader, self.index]

    def reads_right(self) -> bool:
        return self.reader.load(1, 2, 3) == [[1], [2], [3]]

    def announce(self, address: str) -> None:
        """Tells all servers that the objects of `index` are read at this address."""
        instance = {
            "instance_id": "other", "ip": "127.0.0.1", "http_port": self.index.launch.port,
            "p2p_advertised_url": address, "mq_port": self.index.mq,
        }  # fmt: skip
        status, answer = post(f"http://127.0.0.1:{self.coordinator}/instances", instance)
        assert status == 200, answer


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    port = free_port()
    coordinator = lmcache(
        "lmcache-coordinator", "lmcache.cli.main", "coordinator", "--host", "127.0.0.1", "--port", str(port),
        port=port,
    )  # fmt: skip
    made = Fleet(port)
    with running([coordinator]), ExitStack() as started:
        for node in made.nodes:
            node.servers = started.enter_context(running([node.launch]))
        both = [made.owner, made.reader]
        assert eventually(lambda: [_peers(node.server) for node in both] == [1, 1], _PATIENCE_S)
        made.owner.store(1, 2, 3)
        made.index.store(7, 8)
        yield made


def peers(*arguments: str) -> str:
    command = [str(BIN / "python"), "-P", str(HERE / "lmcache_peers.py"), *arguments]
    ran = subprocess.run(command, cwd=ENGINES, capture_output=True, text=True, check=True, timeout=600)
    return ran.stdout


def test_objects_arrive_and_others_do_not(fleet: Fleet) -> None:
    """Also after all objects were freed under their locks, and others took their places."""
    assert fleet.reader.load(1, 2, 3, 4) == [[1], [2], [3], None]
    assert fleet.reader.load(1, model="other") == [None]
    fleet.owner.do(do="clear")
    fleet.owner.store(3, 2, 1)
    assert fleet.reads_right()
    assert not fleet.owner.logged("refused a reader")
    assert not fleet.reader.logged("were not read")


def test_servers_live_through_hostile_messages(fleet: Fleet) -> None:
    for node in (fleet.owner, fleet.reader):
        assert int(peers("send", node.p2p)) >= 40
        assert fleet.reads_right()
        assert node.logged("refused a reader") > 1
        assert not node.logged("unexpected error")
        assert not node.logged("Traceback")


def test_readers_that_do_not_match_are_refused(fleet: Fleet) -> None:
    answers = json.loads(peers("ask", fleet.owner.p2p))
    assert set(answers.values()) == {"refused"}, answers
    assert len(answers) == 5
    assert fleet.reads_right()


def test_owners_that_do_not_match_harm_nobody_else(fleet: Fleet) -> None:
    kinds = {kind: free_port() for kind in ("garbage", "silent", "stale", "fewer", "layout", "huge")}
    command = [str(BIN / "python"), "-P", str(HERE / "lmcache_peers.py"), "serve"]
    command += [f"{kind}={port}" for kind, port in kinds.items()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ENGINES
    ) as other:
        assert other.stdout is not None
        assert any(line == "serving\n" for line in other.stdout)
        for kind, port in kinds.items():
            address = f"127.0.0.1:{port}"
            fleet.announce(address)
            assert eventually(partial(_reads_from, fleet, address), _PATIENCE_S), kind
            assert fleet.reader.load(7, 8) == [None, None], kind
            assert fleet.reader.logged(f"2 objects of {address} were not read"), kind
            assert fleet.reads_right(), kind
        other.communicate()
    address = f"127.0.0.1:{free_port()}"  # where nobody answers
    fleet.announce(address)
    assert eventually(
        lambda: fleet.reader.logged("Failed to add P2P adapter for peer other") > 0, _PATIENCE_S
    )
    assert fleet.reads_right()
    assert not fleet.reader.logged("unexpected error")


def _reads_from(fleet: Fleet, address: str) -> bool:
    """Whether the servers have a client of the peer at this address. LMCache's status does not say the address."""
    fleet.reader.load(7)
    return fleet.reader.logged(f"objects of {address} were not read") > 0


def test_a_restarted_owner_is_read_from_again(fleet: Fleet) -> None:
    fleet.owner.servers.append(fleet.owner.server.restarted())
    fleet.owner.server.wait()
    fleet.owner.store(1, 2, 3)
    assert eventually(lambda: fleet.reads_right(), _PATIENCE_S), fleet.reader.server.tail(20)
